"""Processes that hold memory of the card, and a serve that sees them through the stub driver."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import tests.fakes.engine_process
from tests.fakes.nvml_stub import Driver
from tests.processes import Processes
from tests.server.served import COMMAND, Served
from tests.waiting import wait_until

__all__ = ["EngineProcesses", "Occupants", "outside"]

PAUSE = "import sys, time; print('ready', flush=True); time.sleep(1000)"
CHILD = "import subprocess; child = subprocess.Popen(['sleep', '1000'])\n"


class EngineProcesses:
    """An Ollama with a runner and a ComfyUI, each a process of its own.

    Attributes:
        ollama_url: Where the one listens.
        comfy_url: Where the other does.
        runner: The pid of Ollama's child.
        comfy: The pid of ComfyUI.
    """

    def __init__(self, processes: Processes, folder: Path) -> None:
        ollama_log, comfy_log = folder / "ollama.log", folder / "comfy.log"
        processes.start([sys.executable, tests.fakes.engine_process.__file__], log=ollama_log)
        comfy = processes.start(
            [sys.executable, "-m", "ocgpu.simulators", "comfyui"], log=comfy_log
        )
        said = json.loads(wait_until(lambda: _line(ollama_log), what="Ollama"))
        self.ollama_url: str = said["url"]
        self.runner: int = said["runner"]
        self.comfy = comfy.pid
        heard = wait_until(lambda: _line(comfy_log), what="ComfyUI")
        self.comfy_url = heard.removeprefix("listening on ")


class Occupants:
    """Starts processes of this test, and a serve that sees what the driver says of them."""

    def __init__(self, processes: Processes, driver: Driver, folder: Path) -> None:
        self._processes = processes
        self._driver = driver
        self._folder = folder
        self._started = 0

    def program(self, text: str, **environ: str) -> tuple[int, list[int]]:
        """Run a Python program that prints one line when it is ready; its pid and that line."""
        self._started += 1
        log = self._folder / f"program-{self._started}.log"
        started = self._processes.start([sys.executable, "-c", text], log=log, environ=environ)
        line = wait_until(lambda: _line(log), what="the program")
        return started.pid, [int(word) for word in re.findall(r"\d+", line)]

    def stranger(self, name: str = "stranger") -> int:
        """A process that knows nothing of ocgpu."""
        return self.program(f"open('/proc/self/comm', 'w').write({name!r})\n{PAUSE}")[0]

    def peer(self, name: str) -> tuple[int, int]:
        """A peer with a child: the pids of both."""
        pid, (child,) = self.program(
            f"{CHILD}import ocgpu, time; pacer = ocgpu.Pacer(name={name!r})\n"
            "print(child.pid, flush=True); time.sleep(1000)"
        )
        return pid, child

    def serve(self, engines: EngineProcesses, **settings: str) -> Served:
        """A real serve before these engines, that has looked at the card once."""
        environ = {
            "LISTEN_OLLAMA": "127.0.0.1:0",
            "LISTEN_COMFY": "127.0.0.1:0",
            "LISTEN_ADMIN": "127.0.0.1:0",
            "OLLAMA_URL": engines.ollama_url,
            "COMFY_URL": engines.comfy_url,
            "LOG_FORMAT": "json",
            **self._driver.environ,
            **settings,
        }
        log = self._folder / "serve.log"
        return Served(self._processes.start(COMMAND, log=log, environ=environ), log)


def outside(served: Served) -> list[dict[str, Any]] | None:
    """What `/healthz` says of outsiders."""
    found: list[dict[str, Any]] | None = served.health()["outside"]["processes"]
    return found


def _line(log: Path) -> str:
    text = log.read_text()
    return text.splitlines()[0] if "\n" in text else ""
