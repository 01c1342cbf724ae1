"""A program that computes on a pretend GPU: one core, contended, in steps of a known cost.

Two programs pinned to one core get half of it each, as two on one GPU do, so a pacer can be seen
and measured without a GPU. A step hashes a buffer (which releases the GIL) and costs the same work
wherever it runs.

It obeys lines on standard input: `work`, `idle`, `weight W`, `snapshot`; the end of the input ends
it. It prints one JSON object a line: what it did so far every 50 ms, and the answers.
"""

import argparse
import hashlib
import json
import os
import sys
import threading
import time

from ocgpu.pacer import Pacer, weight_argument

REPORT_EVERY_S = 0.05
CALIBRATION_BYTES = 1 << 20


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


class Worker:
    """The loop: steps while told to work, otherwise waits to be told."""

    def __init__(self, pacer: Pacer | None, size: int) -> None:
        self._pacer = pacer
        self._buffer = bytes(size)
        self._working = threading.Event()
        self._ended = threading.Event()
        self._steps = 0
        self._slept = 0.0
        self._reported = 0.0
        self._write = threading.Lock()

    def run(self) -> None:
        """Work until the input ends."""
        threading.Thread(target=self._listen, daemon=True).start()
        self.report()
        while not self._ended.is_set():
            if not self._working.wait(0.05):
                continue
            self._step()
            if time.monotonic() - self._reported >= REPORT_EVERY_S:
                self.report()

    def _step(self) -> None:
        if self._pacer is not None:
            self._slept += self._pacer.step()
        hashlib.sha256(self._buffer).digest()
        if self._pacer is not None:
            self._pacer.done()
            if not self._working.is_set():
                self._pacer.idle()
        self._steps += 1

    def report(self) -> None:
        """Print what was done so far."""
        self._reported = time.monotonic()
        self._print({"t": self._reported, "steps": self._steps, "slept": self._slept})

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
            case ["weight", weight] if self._pacer is not None:
                self._pacer.weight = float(weight)
            case ["snapshot"] if self._pacer is not None:
                self._print({"snapshot": self._pacer.snapshot().to_dict()})

    def _print(self, answer: dict[str, object]) -> None:
        with self._write:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def main() -> int:
    """Run a worker; see the module."""
    parser = argparse.ArgumentParser(prog="python -m ocgpu.simulators.gpu_worker")
    parser.add_argument("--gpu", default=None, help="GPU key")
    parser.add_argument("--name", default=None, help="what the other peers see")
    parser.add_argument("--weight", type=weight_argument, default=1.0, help="relative claim")
    parser.add_argument("--core", type=int, default=None, help="the core that is the device")
    parser.add_argument("--step-bytes", type=int, default=0, help="bytes to hash a step")
    parser.add_argument("--step-ms", type=float, default=9.0, help="cost of a step to calibrate")
    parser.add_argument("--unpaced", action="store_true", help="do not join the peers")
    arguments = parser.parse_args()
    if arguments.core is not None:
        pin(arguments.core)
    size = arguments.step_bytes or step_bytes(arguments.step_ms / 1000)
    pacer = None
    if not arguments.unpaced:
        pacer = Pacer(arguments.weight, arguments.name, arguments.gpu, strict=True)
    Worker(pacer, size).run()
    return 0


def _hash_seconds(buffer: bytes) -> float:
    started = time.thread_time()
    hashlib.sha256(buffer).digest()
    return time.thread_time() - started


if __name__ == "__main__":
    sys.exit(main())
