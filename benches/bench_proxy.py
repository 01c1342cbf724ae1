"""What the proxy adds to a request at one connection, beside no proxy and beside nginx.

The upstream is the package's own Ollama simulator without waits. A figure of the proxy less the
direct one is what the proxy adds.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from tests.waiting import wait_until

GET = "GET /api/version, 1 connection"
POST = "locked POST of 2 KB, 1 connection"
ROUNDS = 1500
GENERATE = json.dumps(
    {"model": "llama3.2:latest", "prompt": "x" * 1900, "stream": False, "options": {}}
).encode()


@pytest.fixture(scope="module")
def upstream() -> Iterator[int]:
    command = [sys.executable, "-m", "ocgpu.simulators", "ollama"]
    command += ["--load-time", "0", "--token-time", "0", "--tokens", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline().rsplit(":", 1)[1])
        process.terminate()


@pytest.fixture(scope="module")
def ocgpu_port(upstream: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    directory = tmp_path_factory.mktemp("serve")
    environ = {
        **os.environ,
        "OCGPU_DIR": str(directory),
        "OCGPU_GPU_KEY": "bench",
        "LISTEN_OLLAMA": "127.0.0.1:0",
        "LISTEN_ADMIN": "127.0.0.1:0",
        "OLLAMA_URL": f"http://127.0.0.1:{upstream}",
        "COMFY_URL": "",
        "LOG_LEVEL": "info",
    }
    log = directory / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", "ocgpu", "serve"], env=environ, stderr=output
        ) as process,
    ):
        found = wait_until(
            lambda: re.search(r"listener=ollama url=http://127.0.0.1:(\d+)", log.read_text()), 20
        )
        yield int(found[1])
        process.terminate()


@pytest.fixture(scope="module")
def nginx_port(upstream: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not at hand: Debian's `nginx-light` has it")
    directory = tmp_path_factory.mktemp("nginx")
    port = free_port()
    configuration = directory / "nginx.conf"
    configuration.write_text(nginx_configuration(directory, port, upstream))
    with subprocess.Popen(
        [program, "-c", str(configuration), "-e", str(directory / "errors")]
    ) as p:
        wait_until(lambda: listens(port), 10)
        yield port
        p.terminate()


def test_get_direct(benchmark: BenchmarkFixture, upstream: int) -> None:
    measure(benchmark, GET, upstream, "GET", "/api/version", None)


def test_get_through_nginx(benchmark: BenchmarkFixture, nginx_port: int) -> None:
    measure(benchmark, GET, nginx_port, "GET", "/api/version", None)


def test_get_through_ocgpu(benchmark: BenchmarkFixture, ocgpu_port: int) -> None:
    measure(benchmark, GET, ocgpu_port, "GET", "/api/version", None)


def test_post_direct(benchmark: BenchmarkFixture, upstream: int) -> None:
    measure(benchmark, POST, upstream, "POST", "/api/generate", GENERATE)


def test_post_through_nginx(benchmark: BenchmarkFixture, nginx_port: int) -> None:
    measure(benchmark, POST, nginx_port, "POST", "/api/generate", GENERATE)


def test_post_through_ocgpu(benchmark: BenchmarkFixture, ocgpu_port: int) -> None:
    measure(benchmark, POST, ocgpu_port, "POST", "/api/generate", GENERATE)


def measure(
    benchmark: BenchmarkFixture, group: str, port: int, method: str, path: str, body: bytes | None
) -> None:
    """Time one request after the other on one connection."""
    benchmark.group = group
    connection = HTTPConnection("127.0.0.1", port)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def request() -> None:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        assert reply.status == 200

    benchmark.pedantic(request, rounds=ROUNDS, iterations=1, warmup_rounds=100)
    connection.close()


def nginx_configuration(directory: Path, port: int, upstream: int) -> str:
    """One worker, upstream keep-alive on, buffering off: what the proxy is compared with."""
    return f"""
daemon off; master_process off; worker_processes 1; pid {directory}/pid;
error_log {directory}/errors;
events {{ worker_connections 512; }}
http {{
  access_log off; client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;
  upstream engine {{ server 127.0.0.1:{upstream}; keepalive 64; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine; proxy_buffering off; proxy_http_version 1.1;
      proxy_set_header Connection ""; proxy_set_header Host 127.0.0.1;
    }}
  }}
}}
"""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody accepts on `port`."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
