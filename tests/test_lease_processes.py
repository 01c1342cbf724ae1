"""`Lease` among processes: exclusion, death, fork, and other programs that use flock(2)."""

import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ocgpu import Lease, LeaseBusyError, lease_status
from tests.holders import Holder, holder
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")
needs_flock = pytest.mark.skipif(shutil.which("flock") is None, reason="flock(1) is not installed")


def in_fork(check: Callable[[], bool]) -> bool:
    """Run `check` in a forked child that ends without any cleaning up."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_release_on_process_exit() -> None:
    with holder() as other:
        with pytest.raises(LeaseBusyError) as busy:
            Lease().acquire(timeout=0)
        assert busy.value.holder == other.pid

        other.end()

        assert Lease().try_acquire()


def test_a_killed_holder_is_reclaimed_by_whoever_waits() -> None:
    with holder() as other:
        other.kill()

        Lease().acquire(timeout=20)

        other.process.wait()


def test_a_killed_waiter_stands_in_nobodys_way() -> None:
    lease = Lease()
    lease.acquire()
    waiter = Holder()
    wait_until(lambda: lease.wanted() == 1, what="the other process to wait")

    waiter.kill()
    waiter.end()

    assert lease.wanted() == 0
    lease.release()
    assert Lease().try_acquire()


def test_a_stopped_holder_keeps_the_lease() -> None:
    with holder() as other:
        os.kill(other.pid, signal.SIGSTOP)
        try:
            assert not Lease().try_acquire()
        finally:
            os.kill(other.pid, signal.SIGCONT)


def test_shared_holders_of_two_processes_are_both_named() -> None:
    with holder("shared") as other, Lease(mode="shared"):
        status = lease_status()

    assert {party.pid for party in status.holders} == {os.getpid(), other.pid}
    assert status.mode == "shared"


def test_many_processes_never_hold_at_once(tmp_path: Path) -> None:
    code = (
        "import ocgpu, pathlib, sys\n"
        "counter = pathlib.Path(sys.argv[1])\n"
        "lease = ocgpu.Lease()\n"
        "for _ in range(100):\n"
        "    with lease:\n"
        "        counter.write_text(str(int(counter.read_text()) + 1))\n"
    )
    counter = tmp_path / "counter"
    counter.write_text("0")

    workers = [subprocess.Popen([sys.executable, "-c", code, counter]) for _ in range(4)]

    assert [worker.wait(timeout=25) for worker in workers] == [0] * 4
    assert counter.read_text() == "400"


def test_a_forked_child_neither_holds_nor_frees() -> None:
    lease = Lease()
    lease.acquire()

    def check() -> bool:
        inherited = lease.held
        lease.release()
        lease.__exit__(None, None, None)
        return not inherited and not Lease().try_acquire()

    assert in_fork(check)
    assert lease.held
    assert not Lease().try_acquire()


def test_a_forked_child_may_take_the_lease_for_itself_with_the_same_object() -> None:
    lease = Lease()
    lease.acquire()
    lease.release()

    def check() -> bool:
        lease.acquire(timeout=20)
        return lease.held and lease_status().holders[0].pid == os.getpid()

    assert in_fork(check)
    assert not lease.held
    assert lease.try_acquire()


def test_a_forked_child_does_not_keep_a_dead_parents_lease() -> None:
    code = (
        "import ocgpu, os, sys, time\n"
        "lease = ocgpu.Lease(); lease.acquire()\n"
        "if os.fork() == 0:\n"
        "    print(os.getpid(), flush=True)\n"
        "    sys.stdin.read(); os._exit(0)\n"
        "os.wait()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())

    parent.kill()
    parent.wait()

    assert Path(f"/proc/{child}").exists()
    Lease().acquire(timeout=20)
    parent.communicate()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_pool_of_workers_does_not_keep_the_lease(method: str) -> None:
    lease = Lease()
    lease.acquire()
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(os.getpid) != os.getpid()
        lease.release()
        assert Lease().try_acquire()


def test_a_program_started_with_open_descriptors_does_not_keep_the_lease() -> None:
    lease = Lease()
    lease.acquire()
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        lease.release()
        assert Lease().try_acquire()
    finally:
        child.kill()
        child.wait()


@needs_flock
@pytest.mark.parametrize(
    ("ours", "theirs", "both"), [("exclusive", "-s", False), ("shared", "-s", True)]
)
def test_flock_the_program_excludes_and_is_excluded(ours: str, theirs: str, both: bool) -> None:
    lease = Lease(mode=ours)  # type: ignore[arg-type]
    lease.acquire()
    tried = subprocess.run(["flock", "-n", theirs, lease.path, "true"], check=False)
    assert (tried.returncode == 0) is both
    lease.release()

    other = subprocess.Popen(
        ["flock", "-x", lease.path, "sh", "-c", "echo held; cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout is not None
    assert other.stdout.read(5) == b"held\n"
    assert not lease.try_acquire()
    status = lease_status()
    assert (status.held, status.mode) == (True, "exclusive")
    other.communicate()
    lease.acquire(timeout=20)


@needs_flock
def test_flock_the_program_is_seen_as_a_waiter() -> None:
    with Lease() as lease:
        other = subprocess.Popen(["flock", lease.path, "true"])
        wait_until(lambda: len(lease_status().waiters) == 1, what="flock to wait")
        assert lease.wanted() == 0

    assert other.wait(timeout=20) == 0


def test_fcntl_flock_excludes_and_is_excluded() -> None:
    lease = Lease()
    lease.acquire()
    with lease.path.open("rb+") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lease.release()

        fcntl.flock(file, fcntl.LOCK_EX)

        assert not lease.try_acquire()
        assert lease_status().holders[0].pid == os.getpid()
    assert lease.try_acquire()


def test_closing_another_handle_of_the_file_frees_nothing() -> None:
    with Lease() as lease:
        lease.path.read_bytes()

        assert not Lease().try_acquire()


def test_a_record_of_gpulease_names_the_holder() -> None:
    lease = Lease()
    with lease:
        pass
    with lease.path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b"4711\n")
        file.truncate(5)
        file.flush()

        with pytest.raises(LeaseBusyError) as busy:
            Lease().acquire(timeout=0)

    assert busy.value.holder in {4711, os.getpid()}


def test_ctrl_c_ends_a_waiting_process() -> None:
    code = "import ocgpu\nprint('waits', flush=True)\nocgpu.Lease().acquire()"
    with Lease() as lease:
        waiter = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        wait_until(lambda: lease.wanted() == 1, what="the process to wait")
        waiter.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, errors = waiter.communicate(timeout=20)
        took = time.monotonic() - start

        assert b"KeyboardInterrupt" in errors
        assert lease.wanted() == 0
        assert took < 5.0
