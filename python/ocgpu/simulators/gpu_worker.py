"""A program that computes on a pretend GPU: one core, contended, in steps of a known cost.

Two programs pinned to one core get half of it each, as two on one GPU do, so a pacer can be seen
and measured without a GPU. A step hashes bytes (which releases the GIL) and costs the same work
wherever it runs. Steps come in an endless stream, or in requests: a long step (the prefill), then
many short ones, then `--think-s` of silence; without silence the requests form one stream.

The core is cut into slices by the operating system, as a GPU driver does between processes. With
`--queue FILE` it is a queue instead: a step that has begun runs to its end before another's begins.

It obeys lines on standard input, and ends with the input:

    work, idle   begin to work; finish the step and be idle
    weight W     set the weight
    snapshot     print what the pacer sees
    trace        print every step since the last `trace` (with `--trace`)
    hang         block the working thread for ever inside its next step; the heartbeat goes on

It prints one JSON object a line: what it did so far every 50 ms, and the answers. `t` and all times
of a trace are CLOCK_MONOTONIC, which the processes of a machine share.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ocgpu.pacer import Pacer, weight_argument

REPORT_EVERY_S = 0.05
CALIBRATION_BYTES = 1 << 20
CHUNK = memoryview(bytes(256 * 1024))
"""Hashed again and again: it stays in the core's cache, so that the cost is the core's alone."""


def step_bytes(seconds: float) -> int:
    """How many bytes to hash for a step of `seconds` of this core's time.

    Measured in processor time, so that neighbours on the core do not stretch it.
    """
    buffer = bytes(CALIBRATION_BYTES)
    best = min(_hash_seconds(buffer) for _ in range(20))
    return max(4096, int(CALIBRATION_BYTES * seconds / best))


def pin(core: int) -> bool:
    """Keep this process on one core; False where the platform does not offer it."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(0, {core})
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Load:
    """What a worker computes, in bytes to hash.

    Attributes:
        step: One step.
        prefill: The first step of a request, 0 for none.
        steps: How many steps a request has after its prefill; 0 makes an endless stream.
        think: Seconds of silence after a request; 0 goes on with the next at once.
    """

    step: int
    prefill: int = 0
    steps: int = 0
    think: float = 0.0

    def sizes(self) -> Iterator[int]:
        """The steps of one request."""
        if self.prefill:
            yield self.prefill
        yield from itertools.repeat(self.step, self.steps) if self.steps else iter([self.step])


class Queue:
    """A device that runs one step at a time, in the order of arrival.

    Whoever waits for the device keeps the door shut, so one that has just finished cannot pass it.

    Args:
        path: A file that all workers of the device name.
    """

    def __init__(self, path: Path) -> None:
        self._door = os.open(f"{path}.door", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._device = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold the device inside."""
        # Here: Windows has no such module, and the default device needs none.
        import fcntl

        fcntl.flock(self._door, fcntl.LOCK_EX)
        fcntl.flock(self._device, fcntl.LOCK_EX)
        fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._device, fcntl.LOCK_UN)


class Worker:
    """The loop: steps while told to work, otherwise waits to be told."""

    def __init__(
        self,
        pacer: Pacer | None,
        load: Load,
        queue: Queue | None = None,
        *,
        trace: bool = False,
        gated: bool = True,
    ) -> None:
        self._pacer = pacer
        self._gated = gated
        self._load = load
        self._queue = queue
        self._working = threading.Event()
        self._ended = threading.Event()
        self._hanging = threading.Event()
        self._steps = 0
        self._bytes = 0
        self._slept = 0.0
        self._stall_ns = 0
        self._last_ns = 0
        self._reported = 0.0
        self._traced = trace
        self._trace: list[tuple[int, int, int, int]] = []
        self._idles: list[int] = []
        self._write = threading.Lock()

    def run(self) -> None:
        """Work until the input ends."""
        threading.Thread(target=self._listen, daemon=True).start()
        self.report()
        while not self._ended.is_set():
            if self._working.wait(0.05):
                self._request()

    def report(self) -> None:
        """Print what was done so far."""
        self._reported = time.monotonic()
        self._print(
            {
                "t": self._reported,
                "steps": self._steps,
                "bytes": self._bytes,
                "stall": self._stall_ns / 1e9,
                "slept": self._slept,
            }
        )

    def _request(self) -> None:
        for size in self._load.sizes():
            self._step(size)
            if time.monotonic() - self._reported >= REPORT_EVERY_S:
                self.report()
            if not self._working.is_set():
                break
        if self._load.think or not self._working.is_set():
            self._idle()
            self._ended.wait(self._load.think)

    def _step(self, size: int) -> None:
        asked = time.monotonic_ns()
        if self._pacer is not None:
            self._slept += self._gate(self._pacer)
        began = time.monotonic_ns()
        with self._device():
            self._compute(size)
        ended = time.monotonic_ns()
        if self._pacer is not None and self._gated:
            self._pacer.done()
        self._steps += 1
        self._stall_ns = max(self._stall_ns, ended - (self._last_ns or asked))
        self._last_ns = ended
        if self._traced:
            self._trace.append((asked, began, ended, size))

    def _gate(self, pacer: Pacer) -> float:
        if self._gated:
            return pacer.step()
        pacer._mark(active=True)
        return 0.0

    def _device(self) -> AbstractContextManager[None]:
        return self._queue.place() if self._queue else nullcontext()

    def _compute(self, size: int) -> None:
        digest = hashlib.sha256()
        for start in range(0, size, len(CHUNK)):
            chunk = CHUNK[: size - start]
            digest.update(chunk)
            self._bytes += len(chunk)
            if self._hanging.is_set():
                self._print({"hung": time.monotonic()})
                self._ended.wait()

    def _idle(self) -> None:
        self._last_ns = 0
        if self._traced:
            self._idles.append(time.monotonic_ns())
        if self._pacer is not None and self._gated:
            self._pacer.idle()
        elif self._pacer is not None:
            self._pacer._mark(active=False)

    def _listen(self) -> None:
        for line in sys.stdin:
            self._obey(line.split())
        self._ended.set()

    def _obey(self, words: list[str]) -> None:
        match words:
            case ["work"]:
                self._working.set()
            case ["idle"]:
                self._working.clear()
            case ["hang"]:
                self._hanging.set()
            case ["weight", weight] if self._pacer is not None:
                self._pacer.weight = float(weight)
            case ["snapshot"] if self._pacer is not None:
                self._print({"snapshot": self._pacer.snapshot().to_dict()})
            case ["trace"]:
                steps, self._trace = self._trace, []
                idles, self._idles = self._idles, []
                self._print({"trace": {"steps": steps, "idles": idles}})

    def _print(self, answer: dict[str, object]) -> None:
        with self._write:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def make_parser() -> argparse.ArgumentParser:
    """The command line of a worker."""
    parser = argparse.ArgumentParser(prog="python -m ocgpu.simulators.gpu_worker")
    parser.add_argument("--gpu", default=None, help="GPU key")
    parser.add_argument("--name", default=None, help="what the other peers see")
    parser.add_argument("--weight", type=weight_argument, default=1.0, help="relative claim")
    parser.add_argument("--schedule", default=None, help="as `Pacer` takes it")
    parser.add_argument("--ungated", action="store_true", help="join, but never wait")
    parser.add_argument("--unpaced", action="store_true", help="do not join the peers")
    parser.add_argument("--core", type=int, default=None, help="the core that is the device")
    parser.add_argument(
        "--queue", type=Path, default=None, help="run one step at a time; see above"
    )
    parser.add_argument("--step-bytes", type=int, default=0, help="bytes to hash a step")
    parser.add_argument("--step-ms", type=float, default=9.0, help="cost of a step")
    parser.add_argument(
        "--bytes-per-ms", type=int, default=0, help="what a millisecond hashes, else measured"
    )
    parser.add_argument("--prefill-ms", type=float, default=0.0, help="cost of a first step")
    parser.add_argument("--steps", type=int, default=0, help="steps a request, 0: endless")
    parser.add_argument("--think-s", type=float, default=0.0, help="silence after a request")
    parser.add_argument("--trace", action="store_true", help="keep every step for `trace`")
    return parser


def main() -> int:
    """Run a worker; see the module."""
    arguments = make_parser().parse_args()
    if arguments.core is not None:
        pin(arguments.core)
    per_ms = arguments.bytes_per_ms or step_bytes(0.001)
    load = Load(
        step=arguments.step_bytes or int(per_ms * arguments.step_ms),
        prefill=int(per_ms * arguments.prefill_ms),
        steps=arguments.steps,
        think=arguments.think_s,
    )
    pacer = None
    if not arguments.unpaced:
        pacer = Pacer(
            arguments.weight,
            arguments.name,
            arguments.gpu,
            schedule=arguments.schedule,
            strict=True,
            _gated=not arguments.ungated,
        )
    queue = Queue(arguments.queue) if arguments.queue else None
    Worker(pacer, load, queue, trace=arguments.trace, gated=not arguments.ungated).run()
    return 0


def _hash_seconds(buffer: bytes) -> float:
    started = time.thread_time()
    hashlib.sha256(buffer).digest()
    return time.thread_time() - started


if __name__ == "__main__":
    sys.exit(main())
