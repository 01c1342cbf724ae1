"""Looking at a lease: who holds, who waits, and the record in its file."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from ocgpu import Lease, LeaseBusyError, LeaseError, lease_status
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")


def until_waiting(count: int = 1) -> None:
    wait_until(lambda: len(lease_status().waiters) == count, what=f"{count} waiters")


def test_status_names_holder_and_waiter() -> None:
    with Lease(reason="fine-tune"):
        waiter = Lease(mode="shared")
        thread = threading.Thread(target=waiter.acquire)
        thread.start()
        until_waiting()
        status = lease_status()
    thread.join(timeout=20)
    waiter.release()

    (holder,), (waiting,) = status.holders, status.waiters
    assert (status.held, status.mode) == (True, "exclusive")
    assert (holder.pid, holder.reason) == (os.getpid(), "fine-tune")
    assert holder.since == pytest.approx(time.time(), abs=60)
    assert (waiting.pid, waiting.mode) == (os.getpid(), "shared")
    assert waiting.since == pytest.approx(time.time(), abs=60)
    assert json.loads(status.to_json()) == status.to_dict()


def test_status_of_a_free_lease_creates_no_file(gpu_dir: Path) -> None:
    status = lease_status()

    assert status.to_dict() == {"held": False, "mode": None, "holders": [], "waiters": []}
    assert list(gpu_dir.iterdir()) == []


def test_looking_never_makes_a_try_fail() -> None:
    stop = threading.Event()
    looks = 0

    def look() -> None:
        nonlocal looks
        while not stop.is_set():
            lease_status()
            looks += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        lease = Lease()
        tries = 0
        while looks < 300 or tries < 2000:
            assert lease.try_acquire()
            lease.release()
            tries += 1
    finally:
        stop.set()
        thread.join()


def test_wanted_counts_who_waits_behind_the_holder() -> None:
    holder = Lease()
    assert holder.wanted() == 0
    holder.acquire()
    assert holder.wanted() == 0
    waiters = [threading.Thread(target=lambda: Lease().acquire()) for _ in range(2)]
    for waiter in waiters:
        waiter.start()

    wait_until(lambda: holder.wanted() == 2, what="two waiters")

    holder.release()
    for waiter in waiters:
        waiter.join(timeout=20)


def test_garbage_in_the_lease_file_disturbs_nothing() -> None:
    with Lease() as lease:
        lease.path.write_bytes(b"\xff\x00" * 400)
        status = lease_status()
        with pytest.raises(LeaseBusyError):
            Lease().acquire(timeout=0)

    assert status.held
    assert all(holder.reason is None for holder in status.holders)
    assert lease.try_acquire()


def test_the_lease_file_names_the_key_and_holds_one_record(gpu_dir: Path, gpu_key: str) -> None:
    with Lease(reason="é" * 100) as lease:
        record = lease.path.read_bytes()

    assert lease.path == gpu_dir / f"ocgpu-{gpu_key}.lease"
    assert len(record) == 512
    pid, _, rest = record.partition(b"\n")
    assert int(pid) == os.getpid()
    assert json.loads(rest)["reason"] == "é" * 100


def test_a_look_at_a_directory_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OCGPU_DIR", str(tmp_path / "absent"))

    with pytest.raises(LeaseError, match="OCGPU_DIR"):
        lease_status("any")
