"""Peers of several users on one machine."""

from pathlib import Path

import pytest

from ocgpu import peers
from tests.remote import Remote, remote, wait_for_names
from tests.users import BECOME, root_only
from tests.waiting import wait_until

pytestmark = root_only


def enabled(process: Remote, name: str) -> bool:
    process.ask(f"pacer = Pacer(name={name!r})")
    is_enabled: bool = process.ask("pacer.enabled")
    return is_enabled


@pytest.mark.parametrize("root_first", [True, False])
def test_users_join_each_other_whatever_the_umask_of_the_first(
    shared_dir: Path, *, root_first: bool
) -> None:
    with remote(umask=0o077) as first, remote(umask=0o077) as second:
        (second if root_first else first).ask(BECOME)

        assert enabled(first, "first")
        assert enabled(second, "second"), second.ask("pacer.reason")

        wait_for_names(first, {"second"})
        wait_for_names(second, {"first"})
        assert {path.stat().st_mode & 0o777 for path in shared_dir.iterdir()} == {0o666}
        assert len({path.stat().st_ino for path in shared_dir.iterdir()}) == 1


@pytest.mark.usefixtures("shared_dir")
def test_a_peer_of_another_user_frees_the_slot_of_one_that_was_killed() -> None:
    with remote() as victim, remote() as other:
        other.ask(BECOME)
        assert enabled(victim, "victim")
        assert enabled(other, "other"), other.ask("pacer.reason")

        victim.kill()

        wait_until(lambda: [peer.name for peer in peers().peers] == ["other"], 10)


def test_a_segment_for_one_user_refuses_another_with_a_clear_reason(shared_dir: Path) -> None:
    with remote(environ={"OCGPU_SHARE": "user"}) as owner, remote() as other:
        other.ask(BECOME)
        assert enabled(owner, "owner")
        before = {path: path.stat().st_ino for path in shared_dir.iterdir()}

        assert not enabled(other, "other")

        assert "another user made it with `OCGPU_SHARE=user`" in other.ask("pacer.reason")
        assert other.ask("pacer.step()") == 0.0
        assert {path: path.stat().st_ino for path in shared_dir.iterdir()} == before
        assert {path.stat().st_mode & 0o777 for path in before} == {0o600}
        assert owner.ask("len(pacer.snapshot().peers)") == 0


@pytest.mark.usefixtures("shared_dir")
def test_two_peers_of_one_user_share_a_segment_for_that_user() -> None:
    user = {"OCGPU_SHARE": "user"}
    with remote(environ=user) as first, remote(environ=user) as second:
        for process, name in ((first, "first"), (second, "second")):
            process.ask(BECOME)
            assert enabled(process, name), process.ask("pacer.reason")

        wait_for_names(first, {"second"})


def test_a_segment_of_a_seed_peer_that_this_user_cannot_write_to_is_refused_with_a_reason(
    shared_dir: Path, gpu_key: str
) -> None:
    # The seed's programs set no mode: the umask leaves 0644, which another user cannot write to.
    plain = shared_dir / f"opencoti-gpu-{gpu_key}"
    plain.write_bytes(b"OCGPU\0\0\0\1\0\0\0\x10\0\0\0".ljust(4096, b"\0"))
    plain.chmod(0o644)

    with remote() as other:
        other.ask(BECOME)
        assert not enabled(other, "other")

        assert f"`{plain}`" in other.ask("pacer.reason")
        assert "chmod 666" in other.ask("pacer.reason")
        assert other.ask("pacer.step()") == 0.0
        assert list(shared_dir.iterdir()) == [plain]
