"""`Lease` and `lease_status` in one process; others are in `test_lease_processes.py`."""

import fcntl
import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ocgpu
from ocgpu import ConfigError, Lease, LeaseBusyError, LeaseError, LeaseTimeoutError, lease_status
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names are all that is wanted


def threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def until_waiting(count: int = 1) -> None:
    wait_until(lambda: len(lease_status().waiters) == count, what=f"{count} waiters")


def test_no_wait_busy_then_free() -> None:
    holder, other = Lease(), Lease()
    holder.acquire()

    with pytest.raises(LeaseBusyError) as busy:
        other.acquire(timeout=0)
    assert busy.value.holder == os.getpid()
    assert not other.held

    holder.release()
    other.acquire(timeout=0)
    assert other.held


def test_wait_times_out() -> None:
    with Lease(), pytest.raises(LeaseTimeoutError) as error:
        Lease().acquire(timeout=0.05)

    assert isinstance(error.value, TimeoutError)
    assert error.value.holder == os.getpid()
    assert "0.05 s" in str(error.value)


def test_wait_then_succeed() -> None:
    holder, other = Lease(), Lease()
    holder.acquire()
    releaser = threading.Thread(target=lambda: (until_waiting(), holder.release()))
    releaser.start()

    other.acquire(timeout=20)

    releaser.join()
    assert other.held
    assert not holder.held


def test_release_idempotent() -> None:
    lease = Lease()
    lease.release()
    lease.acquire()

    for _ in range(3):
        lease.release()

    assert not lease.held
    assert Lease().try_acquire()


@pytest.mark.parametrize("span", [0.01, 0.05, 0.2])
def test_a_timeout_never_comes_early_in_any_thread(span: float) -> None:
    took: list[float] = []

    def wait() -> None:
        start = time.monotonic()
        with pytest.raises(LeaseTimeoutError):
            Lease().acquire(timeout=span)
        took.append(time.monotonic() - start)

    with Lease():
        wait()
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()

    assert len(took) == 2
    assert min(took) >= span


def test_shared_holders_stand_beside_each_other_and_exclude_exclusive_ones() -> None:
    with Lease(mode="shared"), Lease(mode="shared"):
        assert not Lease().try_acquire()
        assert lease_status().mode == "shared"
    with Lease():
        assert not Lease(mode="shared").try_acquire()


def test_two_threads_exclude_each_other() -> None:
    inside = 0
    worst = 0

    def work() -> None:
        nonlocal inside, worst
        lease = Lease()
        for _ in range(200):
            with lease:
                inside += 1
                worst = max(worst, inside)
                inside -= 1

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert worst == 1


def test_an_object_holds_once_and_a_second_acquisition_says_so() -> None:
    lease = Lease()
    with lease:
        with pytest.raises(LeaseError, match="already holds"):
            lease.acquire()
        with pytest.raises(LeaseError, match="already holds"):
            lease.try_acquire()
        assert lease.held


def test_release_from_another_thread_ends_a_wait() -> None:
    waiter = Lease()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            waiter.acquire()
        except LeaseError as error:
            errors.append(error)

    with Lease():
        thread = threading.Thread(target=wait)
        thread.start()
        until_waiting()
        waiter.release()
        thread.join(timeout=20)

    assert "released while waiting" in str(errors[0])
    assert not waiter.held


def test_a_forgotten_lease_is_given_back() -> None:
    lease = Lease()
    lease.acquire()
    del lease
    gc.collect()

    assert Lease().try_acquire()


def test_the_objects_own_timeout_serves_with_and_acquire() -> None:
    with Lease():
        with pytest.raises(LeaseBusyError), Lease(timeout=0):
            pass
        with pytest.raises(LeaseTimeoutError):
            Lease(timeout=0.01).acquire()
        with pytest.raises(LeaseBusyError):
            Lease(timeout=100).acquire(timeout=0)


def test_ctrl_c_ends_a_wait_and_nothing_is_held() -> None:
    waiter = Lease()

    def interrupt() -> None:
        until_waiting()
        signal.raise_signal(signal.SIGINT)

    with Lease():
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            waiter.acquire()
        thread.join()

    assert not waiter.held
    assert lease_status().waiters == []
    assert Lease().try_acquire()


def test_waits_that_time_out_leave_no_thread_and_no_descriptor() -> None:
    waiter = Lease()
    with Lease():
        with pytest.raises(LeaseTimeoutError):
            waiter.acquire(timeout=0.001)
        wait_until(lambda: lease_status().waiters == [])
        before, threads_before = descriptors(), threads()
        for _ in range(100):
            with pytest.raises(LeaseTimeoutError):
                waiter.acquire(timeout=0.0001)
        assert descriptors() == before
    wait_until(lambda: threads() <= threads_before, what="waiting threads to end")


def test_without_signals_a_wait_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCGPU_NO_SIGNAL", "1")
    holder, waiter = Lease(), Lease()
    holder.acquire()
    with pytest.raises(LeaseTimeoutError):
        waiter.acquire(timeout=0.01)
    assert len(lease_status().waiters) == 1

    holder.release()

    Lease().acquire(timeout=20)
    assert not waiter.held


def test_handlers_of_the_host_program_are_neither_replaced_nor_needed() -> None:
    # Each wait finds the handlers of all real-time signals but one taken, each time another one.
    code = (
        "import ocgpu, signal\n"
        "seen = []\n"
        "numbers = [*range(signal.SIGRTMAX - 4, signal.SIGRTMAX)]\n"
        "holder, waiter = ocgpu.Lease(), ocgpu.Lease()\n"
        "holder.acquire()\n"
        "for number in reversed(numbers):\n"
        "    try: waiter.acquire(timeout=0.01)\n"
        "    except ocgpu.LeaseTimeoutError: pass\n"
        "    signal.signal(number, lambda *got: seen.append(got))\n"
        "print(seen, len(ocgpu.lease_status().waiters))\n"
        "for number in numbers: signal.raise_signal(number)\n"
        "print(len(seen))\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert result.stdout == "[] 0\n4\n"


def test_every_descriptor_closes_on_exec(gpu_dir: Path) -> None:
    with Lease():
        flags = []
        for fd in descriptors():
            link = Path(f"/proc/self/fd/{fd}")
            if link.is_file() and link.readlink().is_relative_to(gpu_dir):
                flags.append(fcntl.fcntl(int(fd), fcntl.F_GETFD))

    assert len(flags) == 2
    assert all(flag & fcntl.FD_CLOEXEC for flag in flags)


def test_a_removed_file_heals_at_the_next_acquisition() -> None:
    lease, other = Lease(), Lease()
    with lease:
        lease.path.unlink()

    with other:
        assert not lease.try_acquire()
    assert lease.try_acquire()
    assert not other.try_acquire()


@pytest.mark.parametrize("what", ["symlink", "fifo", "folder"])
def test_what_is_not_a_plain_file_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "planted"
    if what == "symlink":
        path.symlink_to(tmp_path / "target")
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()

    advice = "symbolic links are not followed" if what == "symlink" else "remove what stands there"
    with pytest.raises(LeaseError, match=advice):
        Lease(path=path).acquire()
    with pytest.raises(LeaseError, match="lease unavailable"):
        lease_status(path=path)
    assert not (tmp_path / "target").exists()


def test_a_missing_folder_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(LeaseError, match="OCGPU_DIR"):
        Lease(path=tmp_path / "absent" / "x.lease").acquire()


@pytest.mark.parametrize("timeout", [-1.0, -0.001, math.nan, math.inf, 1e300])
def test_an_illegal_timeout_is_refused_with_its_legal_form(timeout: float) -> None:
    with pytest.raises(ConfigError, match=r"invalid `timeout`: .*; use a finite number of seconds"):
        Lease(timeout=timeout)
    with pytest.raises(ConfigError, match="invalid `timeout`"):
        Lease().acquire(timeout=timeout)


def test_illegal_mode_reason_and_key_are_refused() -> None:
    with pytest.raises(ConfigError, match='invalid `mode`: "both"; use `exclusive` or `shared`'):
        Lease(mode="both")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="invalid `reason`: 201 bytes"):
        Lease(reason="x" * 201)
    with pytest.raises(ConfigError, match="invalid `gpu`"):
        Lease("../etc/passwd")


def test_the_lease_module_says_who_holds_in_its_repr() -> None:
    with Lease("a-name") as lease:
        assert repr(lease).endswith("ocgpu-a-name.lease' exclusive, held>")
    assert isinstance(lease, ocgpu.Lease)
