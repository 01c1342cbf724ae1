"""A real `ocgpu serve` in front of the fakes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fakes import Engines
from tests.processes import Processes
from tests.server.client import call
from tests.waiting import wait_until

__all__ = ["Served", "start_serve"]

LISTENERS = 3
COMMAND = (sys.executable, "-m", "ocgpu", "serve")


class Served:
    """A running `ocgpu serve`.

    Attributes:
        ollama: Address of its Ollama listener.
        comfy: Address of its ComfyUI listener.
        admin: Address of its admin listener.
        process: The process.
        log: The file with its output.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        addresses = wait_until(self._addresses, what=f"listening; log: {log}")
        self.ollama = addresses["ollama"]
        self.comfy = addresses["comfy"]
        self.admin = addresses["admin"]

    def lines(self) -> list[dict[str, Any]]:
        """Its log so far, one object a line; lines that are no JSON are left out."""
        lines = self.log.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def health(self) -> dict[str, Any]:
        """What `/healthz` says."""
        answer: dict[str, Any] = call("GET", f"{self.ollama}/healthz").json()
        return answer

    def wait_state(self, state: str, **more: object) -> None:
        """Wait until `/healthz` says `state` and, by name, all of `more`."""
        wanted = {"state": state, **more}
        wait_until(lambda: wanted.items() <= self.health().items(), what=str(wanted))

    def metrics(self) -> dict[str, float]:
        """What `/metrics` says: the value by series, labels and all."""
        text = call("GET", f"{self.ollama}/metrics").body.decode()
        pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {series: float(value) for series, value in pairs}

    def wait_waiting(self, kind: str, number: int) -> None:
        """Wait until `number` requests of `kind` (`llm`, `image`) wait for the lock."""
        series = f'gpulock_waiting{{kind="{kind}"}}'
        wait_until(lambda: self.metrics()[series] == number, what=f"{series} {number}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; returns the exit status."""
        os.kill(self.process.pid, number)
        return self.process.wait(timeout=20)

    def _addresses(self) -> dict[str, str]:
        assert self.process.poll() is None, self.log.read_text()
        heard = [line for line in self.lines() if line["message"] == "listening"]
        found = {line["listener"]: line["url"] for line in heard}
        return found if len(found) == LISTENERS else {}


def start_serve(
    processes: Processes, engines: Engines, log: Path, environ: dict[str, str] | None = None
) -> Served:
    """Start `ocgpu serve` before `engines` and wait until it listens.

    Args:
        processes: Ends it with the test.
        engines: Its upstreams.
        log: Where its output goes.
        environ: Settings over those of all tests.
    """
    full = {**serve_environ(engines), **(environ or {})}
    served = Served(processes.start(COMMAND, log=log, environ=full), log)
    # The probes at the start are none of a test's calls.
    wait_until(lambda: engines.record.calls("GET /api/version"), what="probe of Ollama")
    wait_until(lambda: engines.record.calls("GET /system_stats"), what="probe of ComfyUI")
    return served


def serve_environ(engines: Engines) -> dict[str, str]:
    """The settings of all tests: any free ports, the fakes as upstreams, a log to parse."""
    return {
        "LISTEN_OLLAMA": "127.0.0.1:0",
        "LISTEN_COMFY": "127.0.0.1:0",
        "LISTEN_ADMIN": "127.0.0.1:0",
        "OLLAMA_URL": engines.ollama.url,
        "COMFY_URL": engines.comfy.url,
        "LOG_FORMAT": "json",
        "LOG_LEVEL": "debug",
    }
