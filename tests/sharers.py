"""Worker processes on a pretend GPU, driven by a test."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.waiting import wait_until

__all__ = ["Sharer", "sharers"]


GPU_WORKER = (sys.executable, "-m", "ocgpu.simulators.gpu_worker")


class Sharer:
    """One worker process: `python -m ocgpu.simulators.gpu_worker`, or one that speaks as it does.

    Args:
        arguments: Its command line.
        program: What to run.
    """

    def __init__(self, *arguments: str, program: Sequence[str] = GPU_WORKER) -> None:
        self.process = subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._reports: list[dict[str, Any]] = []
        self._snapshots: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait_until(lambda: self._reports, 20, "the worker's first report")

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def steps(self) -> int:
        return int(self._reports[-1]["steps"])

    def rate(self, seconds: float) -> float:
        """Steps a second over a span that begins with the next report."""
        first = self._next_report(self._reports[-1]["t"])
        last = self._next_report(first["t"] + seconds, watchdog=seconds + 20)
        return float((last["steps"] - first["steps"]) / (last["t"] - first["t"]))

    def snapshot(self) -> dict[str, Any]:
        """What the worker's own pacer sees now."""
        seen = len(self._snapshots)
        self.tell("snapshot")
        wait_until(lambda: len(self._snapshots) > seen, 10, "a snapshot")
        return self._snapshots[-1]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _next_report(self, after: float, watchdog: float = 20) -> dict[str, Any]:
        wait_until(lambda: self._reports[-1]["t"] > after, watchdog, "the worker's next report")
        return next(report for report in self._reports if report["t"] > after)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            if "snapshot" in answer:
                self._snapshots.append(answer["snapshot"])
            else:
                self._reports.append(answer)


@contextmanager
def sharers(*command_lines: list[str]) -> Iterator[list[Sharer]]:
    """Start one worker a command line; all of them end with the block."""
    started: list[Sharer] = []
    try:
        started.extend(Sharer(*line) for line in command_lines)
        yield started
    finally:
        for sharer in started:
            sharer.end()


def rates(workers: list[Sharer], seconds: float) -> list[float]:
    """Steps a second of several workers over one span."""
    before = [(worker.steps(), time.monotonic()) for worker in workers]
    deadline = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= deadline, seconds + 10)
    after = [(worker.steps(), time.monotonic()) for worker in workers]
    return [
        (late[0] - early[0]) / (late[1] - early[1])
        for early, late in zip(before, after, strict=True)
    ]
