"""Worker processes on a pretend GPU, driven by a test or a benchmark."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ocgpu import ConfigError, Pacer
from ocgpu.simulators.gpu_worker import step_bytes
from tests.traces import Trace, work
from tests.waiting import wait_until

__all__ = ["Device", "Peer", "Sharer", "has_schedule", "settle", "sharers", "shares", "targets"]


@dataclass(frozen=True)
class Peer:
    """What one worker asks for and computes.

    Attributes:
        weight: Its relative claim.
        step_ms: What a step costs it alone.
        prefill_ms: What the first step of a request costs, 0 for none.
        steps: Steps a request, 0 for an endless stream.
        think_s: Silence after a request.
        ungated: It takes part without ever waiting.
    """

    weight: float
    step_ms: float
    prefill_ms: float = 0.0
    steps: int = 0
    think_s: float = 0.0
    ungated: bool = False


class Device:
    """One core that plays the GPU; this process keeps to the other cores meanwhile.

    One calibration serves all workers, so that a byte costs the same in each of them.

    Args:
        queue: A file, to make it a device that runs one step at a time; see the worker.
    """

    def __init__(self, queue: Path | None = None) -> None:
        self.queue = queue
        self.allowed = os.sched_getaffinity(0)
        self.core = max(self.allowed)
        self.bytes_per_ms = step_bytes(0.1) // 100

    def __enter__(self) -> "Device":
        os.sched_setaffinity(0, self.allowed - {self.core} or self.allowed)
        return self

    def __exit__(self, *_: object) -> None:
        os.sched_setaffinity(0, self.allowed)

    def command(self, peer: Peer, name: str, schedule: str) -> list[str]:
        """The command line of a worker; `schedule` may also be `unpaced`."""
        how = ["--unpaced"] if schedule == "unpaced" else ["--schedule", schedule]
        how += ["--ungated"] if peer.ungated and schedule != "unpaced" else []
        how += ["--queue", str(self.queue)] if self.queue else []
        values = {
            "name": name,
            "weight": peer.weight,
            "core": self.core,
            "bytes-per-ms": self.bytes_per_ms,
            "step-ms": peer.step_ms,
            "prefill-ms": peer.prefill_ms,
            "steps": peer.steps,
            "think-s": peer.think_s,
        }
        options = (word for key, value in values.items() for word in (f"--{key}", str(value)))
        return [*how, "--trace", *options]

    def commands(self, peers: list[Peer], schedule: str) -> list[list[str]]:
        """The command lines of several workers."""
        return [self.command(peer, f"peer-{i}", schedule) for i, peer in enumerate(peers)]


def targets(peers: list[Peer]) -> list[float]:
    """The share of each peer by its weight; here nobody is as light as the floor."""
    total = sum(peer.weight for peer in peers)
    return [peer.weight / total for peer in peers]


def has_schedule(name: str) -> bool:
    """Whether this build knows a schedule; joins the segment of the environment to find out."""
    try:
        Pacer(schedule=name).leave()
    except ConfigError:
        return False
    return True


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
        self._traces: list[Trace] = []
        self._hung: list[float] = []
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

    def snapshot(self) -> dict[str, Any]:
        """What the worker's own pacer sees now."""
        seen = len(self._snapshots)
        self.tell("snapshot")
        wait_until(lambda: len(self._snapshots) > seen, 10, "a snapshot")
        return self._snapshots[-1]

    def trace(self, until: float = 0.0) -> Trace:
        """Every step since the last look, once a step has ended after `until`."""
        wait_until(lambda: self._reports[-1]["t"] > until, 30, "the worker's next report")
        seen = len(self._traces)
        self.tell("trace")
        wait_until(lambda: len(self._traces) > seen, 30, "a trace")
        return self._traces[-1]

    def hang(self) -> float:
        """Block the worker inside its next step; returns when that was, on the common clock."""
        self.tell("hang")
        wait_until(lambda: self._hung, 10, "the worker to hang")
        return self._hung[-1]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            match answer:
                case {"snapshot": snapshot}:
                    self._snapshots.append(snapshot)
                case {"trace": trace}:
                    self._traces.append(Trace.of(trace))
                case {"hung": moment}:
                    self._hung.append(moment)
                case _:
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


def settle(workers: list[Sharer], seconds: float = 1.0) -> None:
    """Let all of them begin to work, until each has made `seconds` of steps beside the others."""
    for worker in workers:
        worker.tell("work")
    begun = time.monotonic()
    for worker in workers:
        worker.trace(until=begun + seconds)


def shares(workers: list[Sharer], seconds: float) -> list[float]:
    """The part of the work of all that each did, over a span that begins now."""
    start = time.monotonic()
    end = start + seconds
    traces = [worker.trace(until=end) for worker in workers]
    done = [work(trace, start, end) for trace in traces]
    return [part / sum(done) for part in done]
