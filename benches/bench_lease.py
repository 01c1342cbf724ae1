"""What the lease costs, each figure beside a raw flock(2) of Python's own in the same run."""

import fcntl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from ocgpu import Lease

ROUNDS = 300

# Waits for the lease once for each line that it reads, and answers when it got it.
_WAITER = """
import asyncio, fcntl, sys, time, ocgpu
kind, path = sys.argv[1:]
lease = ocgpu.Lease(path=path)
file = open(path, "rb+")

def flock():
    fcntl.flock(file, fcntl.LOCK_EX)
    got = time.monotonic_ns()
    fcntl.flock(file, fcntl.LOCK_UN)
    return got

def sync():
    with lease:
        return time.monotonic_ns()

async def waiting():
    async with lease:
        return time.monotonic_ns()

async def serve(once):
    for _ in sys.stdin:
        print(await once() if kind == "async" else once(), flush=True)

asyncio.run(serve({"flock": flock, "sync": sync, "async": waiting}[kind]))
"""


@pytest.fixture(autouse=True)
def lease(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lease]:
    # Where leases live by default: a file system in memory.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setenv("OCGPU_DIR", folder)
        yield Lease("bench")


@pytest.fixture
def file(lease: Lease) -> Iterator[IO[bytes]]:
    with lease:
        pass
    with lease.path.open("rb+") as opened:
        yield opened


@pytest.mark.benchmark(group="acquire + release, free: floor is a flock pair, bar 6x")
def test_floor_flock_pair(benchmark: BenchmarkFixture, file: IO[bytes]) -> None:
    def pair() -> None:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_UN)

    benchmark.pedantic(pair, rounds=200, iterations=500, warmup_rounds=5)


@pytest.mark.benchmark(group="acquire + release, free: floor is a flock pair, bar 6x")
def test_acquire_and_release(benchmark: BenchmarkFixture, lease: Lease) -> None:
    def pair() -> None:
        lease.acquire()
        lease.release()

    benchmark.pedantic(pair, rounds=200, iterations=500, warmup_rounds=5)


@pytest.mark.benchmark(group="acquire + release, free: floor is a flock pair, bar 6x")
def test_with(benchmark: BenchmarkFixture, lease: Lease) -> None:
    def block() -> None:
        with lease:
            pass

    benchmark.pedantic(block, rounds=200, iterations=500, warmup_rounds=5)


class Waiter:
    """Another process that waits for the lease whenever it is told to."""

    def __init__(self, kind: str, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WAITER, kind, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")

    def granted_ns(self) -> int:
        """When its wait ended, on the monotonic clock of the machine."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.mark.benchmark(group="hand-over to a waiting process and its answer: floor is flock")
@pytest.mark.parametrize("kind", ["flock", "sync", "async"])
def test_hand_over(
    benchmark: BenchmarkFixture,
    lease: Lease,
    file: IO[bytes],  # makes the file that the other process opens
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    took_us: list[float] = []
    other = Waiter(kind, lease.path)

    def prepare() -> None:
        lease.acquire()
        other.begin()
        while lease.wanted() == 0:
            time.sleep(0.0002)

    def hand_over() -> None:
        start = time.monotonic_ns()
        lease.release()
        took_us.append((other.granted_ns() - start) / 1000)

    benchmark.pedantic(hand_over, setup=prepare, rounds=ROUNDS)
    other.process.communicate(timeout=20)
    middle, late = statistics.median(took_us), statistics.quantiles(took_us, n=100)[98]
    benchmark.extra_info.update(p50_us=middle, p99_us=late)
    with capsys.disabled():
        print(f"\nhand-over, {kind}: p50 {middle:.1f} us, p99 {late:.1f} us; bar: 100, async 200")
