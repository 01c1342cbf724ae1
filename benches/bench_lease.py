"""What the lease costs, each figure beside a raw flock(2) of Python's own in the same run."""

import fcntl
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import IO

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benches.leases.contenders import ASYNC, FLOOR, SYNC
from benches.leases.waiter import Waiter
from ocgpu import Lease, lease_status

ROUNDS = 300


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


@pytest.mark.benchmark(group="hand-over to a waiting process and its answer: floor is flock")
@pytest.mark.parametrize("kind", [FLOOR, SYNC, ASYNC], ids=["flock", "sync", "async"])
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
        # Not `wanted`, which counts no sleeper in flock(2).
        while not lease_status(path=lease.path).waiters:
            time.sleep(0.0002)

    def hand_over() -> None:
        start = time.monotonic_ns()
        lease.release()
        took_us.append((other.came_ns() - start) / 1000)

    benchmark.pedantic(hand_over, setup=prepare, rounds=ROUNDS)
    other.end()
    middle, late = statistics.median(took_us), statistics.quantiles(took_us, n=100)[98]
    benchmark.extra_info.update(p50_us=middle, p99_us=late)
    with capsys.disabled():
        print(f"\nhand-over, {kind}: p50 {middle:.1f} us, p99 {late:.1f} us; bar: 100, async 200")
