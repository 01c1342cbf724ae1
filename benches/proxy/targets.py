"""Everything that listens during a run: the upstream, and the proxies in front of it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.waiting import wait_until

from benches.proxy.programs import build_go_proxy, build_load, find

__all__ = ["DIRECT", "GO", "NGINX", "OCGPU", "Bench", "Target", "open_bench"]

OCGPU, NGINX, GO, DIRECT = "ocgpu", "nginx", "Go", "no proxy"
POOLED, FRESH, UPGRADE = "pooled", "fresh", "upgrade"
"""What a listener does with its upstream connections: keep them, close them, change protocol."""
START_SECONDS = 20.0


@dataclass(frozen=True)
class Target:
    """One way to the upstream.

    Attributes:
        name: As it stands in the tables.
        pid: Its process, whose CPU time is read; 0 for none.
        ports: By what is done with upstream connections.
    """

    name: str
    pid: int
    ports: dict[str, int]


@dataclass
class Bench:
    """What runs.

    Attributes:
        load: The program that makes the load.
        upstream: Port of the upstream.
        comfy: Port of `ocgpu serve` for the clients of ComfyUI.
        targets: All ways to the upstream.
        pids: All processes that belong to the run.
        absent: What could not be compared with, and why.
    """

    load: Path
    upstream: int
    comfy: int = 0
    targets: list[Target] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def target(self, name: str) -> Target:
        """The one of this name."""
        return next(target for target in self.targets if target.name == name)


@contextmanager
def open_bench(folder: Path, *, peers: bool = True) -> Iterator[Bench]:
    """Start everything, and end it.

    Args:
        folder: For files of the run.
        peers: With nginx and Go.
    """
    load = build_load()
    with ExitStack() as stack:
        process = stack.enter_context(running([load, "upstream"]))
        bench = Bench(load, json.loads(line_of(process))["port"])
        bench.pids.append(process.pid)
        stack.enter_context(serving(bench, folder))
        if peers:
            _add_peers(bench, folder, stack)
        ports = dict.fromkeys((POOLED, FRESH, UPGRADE), bench.upstream)
        bench.targets.append(Target(DIRECT, 0, ports))
        yield bench


def _add_peers(bench: Bench, folder: Path, stack: ExitStack) -> None:
    if nginx := find("nginx"):
        bench.targets.append(stack.enter_context(nginx_running(nginx, bench.upstream, folder)))
        bench.pids.append(bench.targets[-1].pid)
    else:
        bench.absent.append("nginx is not at hand: Debian's `nginx-light` has it")
    if go := find("go"):
        process = stack.enter_context(
            running([build_go_proxy(go), f"http://127.0.0.1:{bench.upstream}"])
        )
        pooled, fresh = int(line_of(process)), int(line_of(process))
        bench.targets.append(
            Target(GO, process.pid, {POOLED: pooled, FRESH: fresh, UPGRADE: pooled})
        )
        bench.pids.append(process.pid)
    else:
        bench.absent.append("Go is not at hand")


@contextmanager
def serving(bench: Bench, folder: Path) -> Iterator[None]:
    """Run `ocgpu serve` in front of the upstream, and add it to the targets."""
    ollama, comfy, admin = free_ports(3)
    environ = {
        **os.environ,
        "OCGPU_DIR": str(folder),
        "OCGPU_GPU_KEY": "bench",
        "LISTEN_OLLAMA": f"127.0.0.1:{ollama}",
        "LISTEN_COMFY": f"127.0.0.1:{comfy}",
        "LISTEN_ADMIN": f"127.0.0.1:{admin}",
        "OLLAMA_URL": f"http://127.0.0.1:{bench.upstream}",
        "COMFY_URL": f"http://127.0.0.1:{bench.upstream}",
        "LOG_LEVEL": "warning",
    }
    with running([sys.executable, "-m", "ocgpu", "serve"], environ) as process:
        bench.comfy = comfy
        bench.pids.append(process.pid)
        ports = dict.fromkeys((POOLED, FRESH, UPGRADE), ollama)
        bench.targets.append(Target(OCGPU, process.pid, ports))
        wait_until(lambda: answers(ollama) and answers(comfy), START_SECONDS, "ocgpu serve")
        yield


@contextmanager
def nginx_running(program: str, upstream: int, folder: Path) -> Iterator[Target]:
    """Run nginx: one worker, a listener for each use of upstream connections."""
    pooled, fresh, upgrade = free_ports(3)
    configuration = folder / "nginx.conf"
    configuration.write_text(nginx_configuration(folder, upstream, pooled, fresh, upgrade))
    with running([program, "-c", configuration, "-e", folder / "errors"]) as process:
        wait_until(lambda: listens(upgrade), START_SECONDS, "nginx")
        yield Target(NGINX, process.pid, {POOLED: pooled, FRESH: fresh, UPGRADE: upgrade})


def nginx_configuration(folder: Path, upstream: int, pooled: int, fresh: int, upgrade: int) -> str:
    """What the proxy is compared with: buffering off, no log, connections of any age."""
    return f"""
daemon off; master_process off; worker_processes 1; pid {folder}/pid;
error_log {folder}/errors;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 1000000000; tcp_nodelay on;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream kept {{
    server 127.0.0.1:{upstream}; keepalive 512; keepalive_requests 1000000000;
  }}
  proxy_buffering off; proxy_http_version 1.1;
  server {{
    listen 127.0.0.1:{pooled} backlog=4096;
    location / {{
      proxy_pass http://kept; proxy_set_header Connection ""; proxy_set_header Host 127.0.0.1;
    }}
  }}
  server {{
    listen 127.0.0.1:{fresh} backlog=4096;
    location / {{
      proxy_pass http://127.0.0.1:{upstream}; proxy_set_header Connection close;
      proxy_set_header Host 127.0.0.1;
    }}
  }}
  server {{
    listen 127.0.0.1:{upgrade} backlog=4096;
    location / {{
      proxy_pass http://127.0.0.1:{upstream}; proxy_set_header Connection upgrade;
      proxy_set_header Upgrade $http_upgrade; proxy_set_header Host 127.0.0.1;
    }}
  }}
}}
"""


@contextmanager
def running(
    command: list[str | Path], environ: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a program; at the end it is asked to end, and ended if it does not."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a program prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def listens(port: int) -> bool:
    """Whether somebody accepts on `port`."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def answers(port: int) -> bool:
    """Whether `/healthz` answers on `port`."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):
        return False
