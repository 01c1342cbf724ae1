"""Real child processes of a test, none of which outlives it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

__all__ = ["Processes", "run_forking"]


def run_forking(program: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program that forks while it has threads, of which newer Pythons warn."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


class Processes:
    """Starts processes and ends what is left of them.

    Args:
        environ: What every child gets in its environment, over the test's own.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environ: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start `command` in a session of its own, its output and errors in the file `log`.

        `descriptors` are open in it under the same numbers.
        """
        full = {**os.environ, **self._environ, **(environ or {})}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=full,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=descriptors,
            )
        self._started.append(process)
        return process

    def end_all(self) -> None:
        """Kill what still runs, with its children, by pid."""
        for process in self._started:
            if process.poll() is None:
                for child in _family(process.pid):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            process.wait(timeout=10)


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    return []
