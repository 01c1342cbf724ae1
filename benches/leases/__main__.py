"""Measure the lease beside other locks: `python -m benches.leases`, or `make bench-lease`.

Every figure of a table comes from one run, the contenders one after the other in rounds, so that a
neighbour's load falls on all of them. Linux only.
"""

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from benches.leases.contenders import CONTENDERS, FLOOR, Contender
from benches.leases.waiter import Waiter
from ocgpu import Lease, LeaseTimeoutError

PAIRS = 2000
TIMEOUTS = (0.01, 0.05, 0.5)
"""Seconds."""
HOLDS = {"2 ms": (0.002, 0.002), "20 to 300 ms": (0.02, 0.3)}
"""Seconds before a release: short, cores warm; or of random length, which favours no poll."""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benches.leases")
    parser.add_argument("--rounds", type=int, default=20, help="of free pairs (default: 20)")
    parser.add_argument("--hand-overs", type=int, default=60, help="of each lock (default: 60)")
    return parser


def main() -> int:
    """Measure, then print the table."""
    arguments = make_parser().parse_args()
    began = os.getloadavg()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        free = free_pairs(Path(folder), arguments.rounds)
        waits = {hold: hand_overs(Path(folder), arguments.hand_overs, hold) for hold in HOLDS}
        late = timeouts(Path(folder))
    write_conditions(began)
    write_free(free)
    for hold, took in waits.items():
        write_hand_overs(hold, took)
    write_timeouts(late)
    return 0


def free_pairs(folder: Path, rounds: int) -> dict[str, float]:
    """Microseconds of acquire + release with nobody else there, median over the rounds."""
    locks = {name: make(folder / f"free-{index}") for index, (name, make) in _numbered()}
    took: dict[str, list[float]] = {name: [] for name in locks}
    for _ in range(rounds):
        for name, lock in locks.items():
            start = time.perf_counter_ns()
            for _ in range(PAIRS):
                lock.acquire()
                lock.release()
            took[name].append((time.perf_counter_ns() - start) / PAIRS / 1000)
    return {name: statistics.median(values) for name, values in took.items()}


def hand_overs(folder: Path, count: int, hold: str) -> dict[str, list[float]]:
    """Microseconds from a release, after a hold of this length, to another process's acquire."""
    chance = random.Random(1)  # noqa: S311  # moments, not secrets
    took: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for index, (name, make) in _numbered():
        path = folder / f"hand-over-{index}"
        lock = make(path)
        lock.acquire()
        lock.release()
        other = Waiter(name, path)
        for _ in range(count):
            lock.acquire()
            other.begin()
            time.sleep(chance.uniform(*HOLDS[hold]))
            start_ns = time.monotonic_ns()
            lock.release()
            took[name].append((other.came_ns() - start_ns) / 1000)
        other.end()
    return took


def timeouts(folder: Path) -> dict[float, list[float]]:
    """Microseconds by which a wait of so many seconds ends late, never early."""
    late: dict[float, list[float]] = {}
    with Lease(path=folder / "timeouts"):
        for seconds in TIMEOUTS:
            late[seconds] = []
            for _ in range(20):
                start_ns = time.monotonic_ns()
                with suppress(LeaseTimeoutError):
                    Lease(path=folder / "timeouts").acquire(timeout=seconds)
                late[seconds].append((time.monotonic_ns() - start_ns) / 1000 - seconds * 1e6)
    return late


def write_conditions(began: tuple[float, float, float]) -> None:
    """Print what the figures depend on."""
    load = [" / ".join(f"{value:.2f}" for value in values) for values in (began, os.getloadavg())]
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("filelock", "fasteners", "portalocker")
    )
    for name, value in (
        ("cores", os.cpu_count()),
        ("system", f"{platform.system()} {platform.release()}"),
        ("python", platform.python_version()),
        ("beside", versions),
        ("begun", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())),
        ("load average before and after", " and ".join(load)),
    ):
        sys.stdout.write(f"- {name}: {value}\n")
    sys.stdout.write("\n")


def write_free(took: dict[str, float]) -> None:
    """Print what acquire + release cost where nobody else is, as Markdown."""
    rows = [(name, f"{us:.2f}", f"{us / took[FLOOR]:.1f}") for name, us in took.items()]
    _write_rows(("free: acquire + release", "us", "x flock"), rows)


def write_hand_overs(hold: str, took: dict[str, list[float]]) -> None:
    """Print how long a waiter waits after the release, as Markdown."""
    rows = []
    for name, values in took.items():
        middle, cuts = statistics.median(values), statistics.quantiles(values, n=100)
        ratio = middle / statistics.median(took[FLOOR])
        rows.append((name, f"{middle:.0f}", f"{cuts[89]:.0f}", f"{cuts[98]:.0f}", f"{ratio:.1f}"))
    _write_rows((f"hand-over after {hold}", "p50 us", "p90 us", "p99 us", "x flock"), rows)


def write_timeouts(late: dict[float, list[float]]) -> None:
    """Print how late a wait ends, as Markdown."""
    rows = [
        (f"{seconds * 1000:g} ms", f"{statistics.median(values):.0f}", f"{max(values):.0f}")
        for seconds, values in late.items()
    ]
    _write_rows(("time-out of `ocgpu.Lease`", "late by p50 us", "at worst us"), rows)


def _write_rows(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    for row in (header, ("---",) * len(header), *rows):
        sys.stdout.write(f"| {' | '.join(row)} |\n")
    sys.stdout.write("\n")


def _numbered() -> list[tuple[int, tuple[str, Callable[[Path], Contender]]]]:
    return list(enumerate(CONTENDERS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
