"""The lease across users, umasks, sticky directories and namespaces."""

from pathlib import Path

import pytest

from ocgpu import Lease, lease_status
from tests.namespaces import in_namespaces
from tests.remote import remote
from tests.users import BECOME, OTHER_UID, root_only
from tests.waiting import wait_until

PROTECTED = Path("/proc/sys/fs/protected_regular")


@root_only
@pytest.mark.usefixtures("shared_dir")
@pytest.mark.parametrize("root_first", [True, False])
def test_users_exclude_and_queue_whatever_the_umask_of_the_first(*, root_first: bool) -> None:
    with remote(umask=0o077) as first, remote(umask=0o077) as second:
        (second if root_first else first).ask(BECOME)
        first.ask("lease = Lease()")
        second.ask("import threading; lease = Lease()")

        assert first.ask("lease.try_acquire()")
        assert not second.ask("lease.try_acquire()")
        second.ask("threading.Thread(target=lease.acquire, daemon=True).start()")
        wait_until(lambda: first.ask("lease.wanted()") == 1)
        first.ask("lease.release()")
        wait_until(lambda: second.ask("lease.held"))


@root_only
def test_a_lease_of_one_user_is_refused_to_another_with_the_remedy(
    shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCGPU_SHARE", "user")
    with Lease(), remote() as other:
        other.ask(BECOME)
        with pytest.raises(AssertionError, match=r"Permission denied.*OCGPU_SHARE=user.*OCGPU_DIR"):
            other.ask("Lease().try_acquire()")
    assert {path.stat().st_mode & 0o777 for path in shared_dir.iterdir()} == {0o600}


@root_only
def test_a_file_of_another_user_in_a_sticky_directory_is_opened(shared_dir: Path) -> None:
    before = PROTECTED.read_text() if PROTECTED.exists() else ""
    try:
        PROTECTED.write_text("1")
    except OSError as error:
        pytest.skip(f"this machine lets nobody set fs.protected_regular: {error}")
    try:
        with remote() as other:
            other.ask(BECOME)
            assert other.ask("lease = Lease(); lease.acquire(); lease.release()") is None
        # O_CREAT on it would be refused here, even to root.
        assert {path.stat().st_uid for path in shared_dir.iterdir()} == {OTHER_UID}
        assert Lease().try_acquire()
    finally:
        PROTECTED.write_text(before)


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_processes_of_two_pid_namespaces_with_equal_pids_exclude_each_other() -> None:
    prefix = in_namespaces("--pid")
    with remote(prefix) as one, remote(prefix) as two:
        one.ask("lease = Lease()")
        two.ask("import threading; lease = Lease()")
        assert one.ask("os.getpid()") == two.ask("os.getpid()")

        assert one.ask("lease.try_acquire()")
        assert not two.ask("lease.try_acquire()")
        two.ask("threading.Thread(target=lease.acquire, daemon=True).start()")

        # Counted across namespaces, but never named by a pid, which means a stranger here.
        wait_until(lambda: one.ask("lease.wanted()") == 1)
        status = lease_status()
        assert status.held
        assert [party.pid for party in status.waiters] == [None]
        one.kill()
        wait_until(lambda: two.ask("lease.held"))


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_an_ipc_namespace_hides_nothing() -> None:
    with Lease(), remote(in_namespaces("--ipc")) as other:
        assert not other.ask("Lease().try_acquire()")


@pytest.mark.usefixtures("gpu_key")
def test_a_file_system_of_its_own_is_a_machine_of_its_own(gpu_dir: Path) -> None:
    # What PrivateTmp and a container's own /dev/shm do: no kernel knows that one card is meant.
    with Lease(), remote(in_namespaces("--mount")) as other:
        other.ask("import subprocess")
        mounted = other.ask(
            f"subprocess.run(['mount', '-t', 'tmpfs', 'none', {str(gpu_dir)!r}]).returncode"
        )
        if mounted != 0:
            pytest.skip("this machine lets a namespace mount no tmpfs")

        assert other.ask("Lease().try_acquire()")


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_there_is_no_way_from_shared_to_exclusive_but_through_free() -> None:
    shared, exclusive = Lease(mode="shared"), Lease()
    with shared:
        assert not exclusive.try_acquire()
        assert shared.held
        with pytest.raises(AttributeError):
            shared.mode = "exclusive"  # type: ignore[misc]
    assert exclusive.try_acquire()
