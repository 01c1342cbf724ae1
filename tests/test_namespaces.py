"""Peers in containers: pid, mount and ipc namespaces, and a file system that is full."""

import time
from pathlib import Path

import pytest

from ocgpu import Pacer, peers
from tests.namespaces import in_namespaces
from tests.remote import Remote, remote, wait_for_names
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_key")
# Mounts a file system of one page over the directory, then runs the rest of its arguments.
PRIVATE = ("sh", "-c", 'mount -t tmpfs -o size=4k none "$OCGPU_DIR" && exec "$@"', "sh")


def own_share(process: Remote) -> float:
    share: float = process.ask("pacer.snapshot().self.share")
    return share


@pytest.mark.usefixtures("gpu_dir")
def test_peers_with_equal_pids_have_two_slots_and_their_shares_and_one_can_die() -> None:
    prefix = in_namespaces("--pid")

    with remote(prefix) as a, remote(prefix) as b:
        for process, name, weight in ((a, "a", 3.0), (b, "b", 1.0)):
            process.ask(f"pacer = Pacer({weight}, {name!r})\npacer._open_request()")
        assert [process.ask("os.getpid()") for process in (a, b)] == [1, 1]
        assert [process.ask("pacer.slot") for process in (a, b)] == [0, 1]
        assert [(peer.name, peer.pid) for peer in peers().peers] == [("a", 1), ("b", 1)]
        wait_for_names(a, {"b"})
        wait_for_names(b, {"a"})
        assert (own_share(a), own_share(b)) == (0.75, 0.25)

        a.kill()
        killed = time.monotonic()
        wait_until(lambda: own_share(b) == 1.0, 30)

        assert time.monotonic() - killed < 3.0
        wait_until(lambda: [(peer.name, peer.slot) for peer in peers().peers] == [("b", 1)], 10)


@pytest.mark.usefixtures("gpu_dir")
def test_a_new_process_with_a_dead_ones_pid_is_not_taken_for_it() -> None:
    prefix = in_namespaces("--pid")

    with Pacer(name="witness") as witness, remote(prefix) as first, remote(prefix) as second:
        first.ask("pacer = Pacer(name='first')")
        first.kill()
        second.ask("pacer = Pacer(name='second')")

        wait_for_names(second, {"witness"})
        wait_until(lambda: [peer.name for peer in witness.snapshot().peers] == ["second"], 10)
        assert witness.snapshot().peers[0].pid == 1


@pytest.mark.usefixtures("gpu_dir")
def test_an_ipc_namespace_does_not_part_peers() -> None:
    with remote(in_namespaces("--ipc")) as inside, Pacer(name="outside") as outside:
        inside.ask("pacer = Pacer(name='inside')")

        wait_for_names(inside, {"outside"})
        assert [peer.name for peer in outside.snapshot().peers] == ["inside"]


def test_peers_with_a_private_directory_each_do_not_see_each_other(gpu_dir: Path) -> None:
    prefix = [*in_namespaces("--mount"), *PRIVATE]

    with remote(prefix) as a, remote(prefix) as b, Pacer(name="outside") as outside:
        for process in (a, b):
            process.ask("pacer = Pacer(name='inside')")
            assert process.ask("[pacer.enabled, pacer.slot]") == [True, 0]

        assert [process.ask("len(pacer.snapshot().peers)") for process in (a, b)] == [0, 0]
        assert outside.snapshot().peers == []
        assert len(list(gpu_dir.iterdir())) == 2


@pytest.mark.usefixtures("gpu_dir")
def test_on_a_full_file_system_the_pacer_is_disabled_with_a_reason_and_the_program_goes_on() -> (
    None
):
    prefix = [*in_namespaces("--mount"), *PRIVATE]

    with remote(prefix) as process:
        process.ask("Path(os.environ['OCGPU_DIR'], 'filler').write_bytes(bytes(4096))")
        process.ask("pacer = Pacer()")

        assert not process.ask("pacer.enabled")
        assert "full" in process.ask("pacer.reason")
        assert process.ask("pacer.step()") == 0.0

        # Nothing half-made stands in the way once there is room.
        process.ask("Path(os.environ['OCGPU_DIR'], 'filler').unlink()")
        assert process.ask("Pacer().enabled")


@pytest.mark.usefixtures("gpu_dir")
def test_a_peer_survives_that_the_file_system_fills_up_after_it_joined() -> None:
    prefix = [*in_namespaces("--mount"), *PRIVATE]

    with remote(prefix) as process:
        process.ask("pacer = Pacer(name='early')")
        process.ask(
            "filler = Path(os.environ['OCGPU_DIR'], 'filler')\n"
            "try:\n    filler.write_bytes(bytes(8192))\n"
            "except OSError: pass\n"
        )

        process.ask("pacer.step(); late = Pacer(name='late')")

        assert process.ask("[pacer.slot, late.slot]") == [0, 1]
