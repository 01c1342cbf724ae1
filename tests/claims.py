"""Counts slots with two owners while workers join and leave and are killed and stopped.

`python -m tests.claims` prints one JSON object. The oracle trusts nothing of the code under test: a
worker that believes it owns a slot writes so, again and again, to one log that all append to. From
the first to the last of an unbroken row of such lines the slot was its own, whatever happened to it
in between and afterwards (a kill ends the row early, which only shortens it). Two rows of different
workers over one slot that overlap in time are a double claim.
"""

import argparse
import ctypes
import json
import logging
import os
import random
import signal
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from ocgpu import Pacer

CONFIRM_EVERY_S = 0.004
# Worker, number of its row, slot, time by CLOCK_MONOTONIC (the same in all pid namespaces).
LINE = struct.Struct("<IIIq")
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
# The seed's 3 s, scaled down so that a short run sees it pass often.
SEED_DEAD_US = 100_000


class Seat(Protocol):
    """A place in the registry by one rule or another."""

    @property
    def slot(self) -> int | None:
        """The slot that the worker believes to own now."""

    def leave(self) -> None:
        """Give it back."""


class SeedSeat:
    """A place by the seed's rule: compare-and-swap on pid, dead after a silent heartbeat.

    Args:
        library: `tests/seed_peer/peer.c`, compiled as a library.
        segment: The segment file.
    """

    def __init__(self, library: ctypes.CDLL, segment: Path) -> None:
        self._library = library
        self._segment = ctypes.c_void_p(library.seed_open(os.fsencode(segment)))
        claimed = library.seed_claim(self._segment, os.getpid(), ctypes.c_float(1.0), b"worker")
        self._slot: int | None = None if claimed < 0 else claimed

    @property
    def slot(self) -> int | None:
        """The slot; looking at it is a heartbeat."""
        if self._slot is not None:
            self._library.seed_beat(self._segment, self._slot)
        return self._slot

    def leave(self) -> None:
        """Give the slot back, if it names this pid."""
        if self._slot is not None:
            self._library.seed_release(self._segment, self._slot, os.getpid())


def load_seed(library: Path) -> ctypes.CDLL:
    """The seed's claim rule, its times scaled down."""
    loaded = ctypes.CDLL(str(library))
    loaded.seed_open.restype = ctypes.c_void_p
    ctypes.c_int64.in_dll(loaded, "seed_dead_us").value = SEED_DEAD_US
    return loaded


@dataclass(frozen=True)
class Work:
    """What every worker does.

    Attributes:
        log: Where the lines go, opened for appending.
        seed: The seed's rule and its segment; None for `ocgpu.Pacer`.
    """

    log: int
    seed: tuple[ctypes.CDLL, Path] | None

    def forever(self, worker: int) -> None:
        """Join, hold, leave; write down what is believed."""
        chance = random.Random()  # noqa: S311  (not a secret)
        row = 0
        while True:
            seat: Seat = SeedSeat(*self.seed) if self.seed else Pacer(name=f"worker {worker}")
            until = time.monotonic() + chance.choice((0.02, 0.05, 0.2, 1.0)) * chance.random()
            believed = None
            while time.monotonic() < until:
                # The time is taken between two looks that agree: the slot was ours at it.
                now_ns = time.monotonic_ns()
                slot = seat.slot
                if slot is not None and slot == believed:
                    os.write(self.log, LINE.pack(worker, row, slot, now_ns))
                elif slot != believed:
                    believed, row = slot, row + 1
                time.sleep(CONFIRM_EVERY_S)
            row += 1
            seat.leave()
            time.sleep(0.02 * chance.random())


class Workers:
    """Processes at work, which are killed, stopped and replaced.

    Args:
        task: What they do.
        count: How many.
        stop_s: How long a stop lasts, at least and at most.
        namespaces: Give each a pid namespace of its own, in which it is pid 1.
    """

    def __init__(
        self, task: Work, count: int, stop_s: tuple[float, float], *, namespaces: bool
    ) -> None:
        self._task = task
        self._stop_s = stop_s
        self._namespaces = namespaces
        self._chance = random.Random()  # noqa: S311  (not a secret)
        self._started = 0
        self._running: dict[int, int] = {}
        self._stopped: dict[int, float] = {}
        self.kills = self.stops = 0
        for _ in range(count):
            self._start()

    def disturb(self, seconds: float) -> None:
        """Kill and stop at random for `seconds`, then kill them all."""
        deadline = time.monotonic() + seconds
        while (now := time.monotonic()) < deadline:
            for pid in [pid for pid, until in self._stopped.items() if until < now]:
                del self._stopped[pid]
                os.kill(pid, signal.SIGCONT)
            victim = self._chance.choice(list(self._running))
            if self._chance.random() < 0.6:
                self._kill(victim)
                self._start()
            elif victim not in self._stopped:
                os.kill(victim, signal.SIGSTOP)
                self._stopped[victim] = now + self._chance.uniform(*self._stop_s)
                self.stops += 1
            time.sleep(0.06 * self._chance.random())
        for pid in list(self._running):
            self._kill(pid)

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(self._running.pop(pid), 0)
        self._stopped.pop(pid, None)
        self.kills += 1

    def _start(self) -> None:
        self._started += 1
        pids, told = os.pipe()
        child = os.fork()
        if child == 0:
            die_with_the_parent()
            if self._namespaces:
                become_pid_1(told)
            self._task.forever(self._started)
        pid: int = struct.unpack("i", os.read(pids, 4))[0] if self._namespaces else child
        os.close(pids)
        os.close(told)
        self._running[pid] = child


def become_pid_1(told: int) -> None:
    """Go on in a child with a pid namespace of its own; this process ends with it.

    Args:
        told: Gets the child's pid as seen from here.
    """
    unshare()
    child = os.fork()
    if child:
        os.write(told, struct.pack("i", child))
        os.waitpid(child, 0)
        os._exit(0)
    die_with_the_parent()


def unshare() -> None:
    """Let the next child be the first of a new pid namespace.

    Raises:
        OSError: That is not permitted here.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWPID) and libc.unshare(CLONE_NEWPID | CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "no pid namespace")


def die_with_the_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Row(NamedTuple):
    """One worker's unbroken belief to own a slot."""

    start_ns: int
    end_ns: int
    worker: int


def rows(log: Path) -> dict[int, list[Row]]:
    """Who believed when to own which slot, in order of their beginnings."""
    spans: dict[tuple[int, int, int], list[int]] = {}
    for worker, row, slot, now_ns in LINE.iter_unpack(log.read_bytes()):
        spans.setdefault((slot, worker, row), [now_ns, now_ns])[1] = now_ns
    by_slot: dict[int, list[Row]] = defaultdict(list)
    for (slot, worker, _), (start_ns, end_ns) in spans.items():
        by_slot[slot].append(Row(start_ns, end_ns, worker))
    return {slot: sorted(found) for slot, found in by_slot.items()}


def double_claims(found: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Pairs of workers that owned one slot at one time."""
    for at, first in enumerate(found):
        for second in found[at + 1 :]:
            if second.start_ns >= first.end_ns:
                break
            if second.worker != first.worker:
                yield first, second


def main() -> int:
    """Run the harness; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims")
    parser.add_argument("--log", type=Path, required=True, help="where the workers' lines go")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument(
        "--stop", type=float, nargs=2, default=(0.05, 4.0), help="seconds of a stop"
    )
    parser.add_argument("--namespaces", action="store_true", help="every worker is pid 1")
    parser.add_argument("--seed", type=Path, nargs=2, help="the seed's rule: library and segment")
    arguments = parser.parse_args()
    logging.getLogger("ocgpu").addHandler(logging.NullHandler())
    seed = arguments.seed and (load_seed(arguments.seed[0]), arguments.seed[1])
    with arguments.log.open("ab") as log:
        task = Work(log.fileno(), seed)
        stop_s, namespaces = tuple(arguments.stop), arguments.namespaces
        workers = Workers(task, arguments.workers, stop_s, namespaces=namespaces)
        workers.disturb(arguments.seconds)
    owned = rows(arguments.log)
    double = [(slot, *pair) for slot, found in owned.items() for pair in double_claims(found)]
    result = {
        "claims": sum(map(len, owned.values())),
        "slots": len(owned),
        "kills": workers.kills,
        "stops": workers.stops,
        "double_claims": len(double),
        "examples": double[:3],
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
