"""First come, first served, among processes."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import filelock
import pytest

from ocgpu import Lease, LeaseBusyError, lease_status
from tests.holders import Holder, holder
from tests.remote import remote
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

# Takes the lease again and again, keeps it until somebody waits, and says whether somebody did.
LOOP = """
import os, sys, time, ocgpu
lease = ocgpu.Lease()
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
for _ in range(int(sys.argv[2])):
    with lease:
        late = time.monotonic() + 0.2
        while not lease.wanted() and time.monotonic() < late:
            pass
        os.write(log, f"{os.getpid()} {lease.wanted()}\\n".encode())
"""


def test_processes_are_served_in_the_order_of_their_arrival() -> None:
    lease = Lease()
    lease.acquire()
    waiters = []
    for number in range(8):
        waiters.append(Holder())
        wait_until(lambda number=number: lease.wanted() == number + 1, what=f"{number + 1} waiters")
    queued = [party.pid for party in lease_status().waiters]
    lease.release()

    served = []
    for waiter in waiters:
        waiter.wait_held()
        served.append(lease_status().holders[0].pid)
        waiter.end()

    assert queued == served == [waiter.pid for waiter in waiters]


def test_whoever_releases_does_not_come_again_before_another_that_waits(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    loops = [subprocess.Popen([sys.executable, "-c", LOOP, log, "200"]) for _ in range(2)]
    assert [loop.wait(30) for loop in loops] == [0, 0]

    lines = [line.split() for line in log.read_text().splitlines()]
    contended = [(a[0], b[0]) for a, b in pairwise(lines) if int(a[1]) > 0]
    again = sum(before == after for before, after in contended)
    assert len(contended) >= 300
    assert again == 0


def test_a_killed_waiter_in_the_middle_of_the_queue_is_passed_over() -> None:
    lease = Lease()
    lease.acquire()
    waiters = []
    for number in range(3):
        waiters.append(Holder())
        wait_until(lambda number=number: lease.wanted() == number + 1)
    waiters[1].kill()
    waiters[1].process.wait(20)

    lease.release()

    for index in (0, 2):
        waiters[index].wait_held()
        waiters[index].end()
    waiters[1].process.communicate()
    assert Lease().try_acquire()


def test_a_holder_killed_with_a_queue_behind_it_hands_over() -> None:
    with holder() as first:
        waiters = [Holder()]
        wait_until(lambda: len(lease_status().waiters) == 1)
        waiters.append(Holder())
        wait_until(lambda: len(lease_status().waiters) == 2)

        first.kill()

        for waiter in waiters:
            waiter.wait_held()
            waiter.end()


def test_a_writer_passes_a_stream_of_readers() -> None:
    ended = threading.Event()

    def read() -> None:
        lease = Lease(mode="shared")
        while not ended.is_set():
            with lease:
                ended.wait(0.005)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        wait_until(lambda: lease_status().held)
        for _ in range(20):
            with Lease(timeout=10):
                assert lease_status().mode == "exclusive"
    finally:
        ended.set()
        for reader in readers:
            reader.join(20)


def test_a_try_that_would_pass_a_queue_is_refused() -> None:
    with holder("shared"), remote() as other:
        other.ask("import threading; lease = Lease()")
        other.ask("threading.Thread(target=lease.acquire, daemon=True).start()")
        wait_until(lambda: len(lease_status().waiters) == 1)

        assert not Lease(mode="shared").try_acquire()
        with pytest.raises(LeaseBusyError):
            Lease(mode="shared").acquire(timeout=0)
        other.kill()
        assert Lease(mode="shared").try_acquire()


def test_a_try_is_never_refused_while_the_lease_is_free() -> None:
    # Waits that end by themselves must not be taken for a queue.
    lease, other = Lease(), Lease()
    for _ in range(300):
        with other, pytest.raises(TimeoutError):
            lease.acquire(timeout=0.0001)

        assert Lease().try_acquire()


def test_a_stopped_waiter_keeps_its_place_and_goes_on() -> None:
    lease = Lease()
    lease.acquire()
    waiter = Holder()
    wait_until(lambda: lease.wanted() == 1)
    os.kill(waiter.pid, signal.SIGSTOP)
    lease.release()

    os.kill(waiter.pid, signal.SIGCONT)

    waiter.wait_held()
    waiter.end()


def test_filelock_excludes_and_is_excluded(gpu_dir: Path) -> None:
    lease = Lease()
    theirs = filelock.FileLock(lease.path)
    assert lease.path.parent == gpu_dir
    with lease, pytest.raises(filelock.Timeout):
        theirs.acquire(timeout=0)

    with theirs:
        assert not lease.try_acquire()
    assert lease.try_acquire()


# gpulease's manner: open, try without waiting, sleep, try again; then its record.
POLLER = """
import fcntl, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o644)
tries = 0
while True:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except BlockingIOError:
        tries += 1
        print("busy", flush=True)
        time.sleep(0.02)
os.pwrite(file, f"{os.getpid()}\\n".encode(), 0)
os.ftruncate(file, len(f"{os.getpid()}\\n"))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_poller_in_the_manner_of_gpulease_excludes_and_is_excluded() -> None:
    lease = Lease()
    lease.acquire()
    poller = subprocess.Popen(
        [sys.executable, "-c", POLLER, lease.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert poller.stdout is not None
    assert [poller.stdout.readline() for _ in range(3)] == ["busy\n"] * 3
    lease.release()
    while (line := poller.stdout.readline()) == "busy\n":
        pass

    assert line == "held\n"
    with pytest.raises(LeaseBusyError) as busy:
        lease.acquire(timeout=0)
    assert busy.value.holder == poller.pid
    poller.communicate(timeout=20)
    assert lease.try_acquire()


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock(1) is not installed")
def test_programs_outside_the_queue_are_shown_once_behind_it() -> None:
    with Lease() as lease:
        inside = Holder()
        wait_until(lambda: lease.wanted() == 1)
        outside = subprocess.Popen(["flock", lease.path, "true"])
        wait_until(lambda: len(lease_status().waiters) == 2, what="both")

        names = [party.name for party in lease_status().waiters]
    assert names[-1] == "flock"
    assert len(names) == 2
    inside.wait_held()
    inside.end()
    assert outside.wait(20) == 0


@pytest.mark.parametrize("span", [0.01, 0.05, 0.2])
def test_a_timeout_in_the_middle_of_the_queue_leaves_no_trace(span: float) -> None:
    with Lease() as lease:
        others = [Holder(), Holder()]
        wait_until(lambda: lease.wanted() == 2)
        start = time.monotonic()

        with pytest.raises(TimeoutError):
            Lease().acquire(timeout=span)

        assert time.monotonic() - start >= span
        assert lease.wanted() == 2
    for _ in others:
        wait_until(lambda: lease_status().held)
        pid = lease_status().holders[0].pid
        next(other for other in others if other.pid == pid).end()
