"""A child never has its parent's place, and nothing ocgpu opens outlives an exec."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ocgpu import peers
from tests.remote import Remote, remote
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

# Each leaves `child`, the pid of a process that sleeps and does nothing else.
CHILDREN = {
    "os.fork": """
child = os.fork()
if child == 0:
    os.close(0); os.close(1)
    time.sleep(60)
    os._exit(0)
""",
    "multiprocessing fork": """
import multiprocessing
process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
process.start()
child = process.pid
""",
    "multiprocessing forkserver": """
import multiprocessing
process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
process.start()
child = process.pid
""",
    "subprocess": """
import subprocess
child = subprocess.Popen(["sleep", "60"], close_fds=False).pid
""",
}
# What a child may do with the copy of its parent's pacer.
DEEDS = {
    "leaves": "pacer.leave()",
    "drops it": "del pacer",
    "exits": "sys.exit(0)",
    "looks": "pacer.snapshot(); pacer.slot; pacer.reason; pacer.idle(); pacer.done()",
    "weighs": "pacer.weight = 7.0",
    "crashes": "os.kill(os.getpid(), signal.SIGKILL)",
}


@contextmanager
def parent_of(kind: str) -> Iterator[tuple[Remote, int]]:
    """A process with a place, and a child of it that sleeps."""
    with remote() as parent:
        parent.ask("pacer = Pacer(name='parent')")
        parent.ask(CHILDREN[kind])
        child: int = parent.ask("child")
        try:
            yield parent, child
        finally:
            os.kill(child, signal.SIGKILL)


def open_files(pid: int) -> list[Path]:
    """What a process has open of the registry's directory."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        # A descriptor may close between the listing and the look.
        with contextlib.suppress(FileNotFoundError):
            found.append(descriptor.readlink())
    return [path for path in found if path.is_relative_to(os.environ["OCGPU_DIR"])]


def listed() -> list[str]:
    return [peer.name for peer in peers().peers if peer.alive]


@pytest.mark.parametrize("deed", DEEDS)
def test_whatever_a_forked_child_does_its_parent_keeps_its_place(deed: str) -> None:
    with remote() as parent:
        parent.ask("pacer = Pacer(2.0, 'parent')")
        before = peers().peers[0]

        parent.ask(
            "child = os.fork()\n"
            "if child == 0:\n"
            f"    try:\n        {DEEDS[deed]}\n"
            "    except BaseException: pass\n"
            "    os._exit(0)\n"
            "os.waitpid(child, 0)\n"
        )
        done = time.time()

        # Not only now: after the next beat too, at which the parent would have mended its place.
        wait_until(lambda: time.time() - peers().peers[0].heartbeat_age_ms / 1000 > done, 10)
        after = peers().peers[0]
        assert (after.name, after.pid, after.slot, after.weight, after.alive) == (
            before.name,
            parent.pid,
            before.slot,
            2.0,
            True,
        )
        assert parent.ask("pacer.enabled")
        assert len(peers().peers) == 1


@pytest.mark.parametrize(
    "kind",
    [
        "os.fork",
        "multiprocessing fork",
        "multiprocessing forkserver",
        "subprocess",
    ],
)
def test_the_death_of_a_parent_frees_its_slot_within_3_seconds_though_its_child_lives(
    kind: str,
) -> None:
    with parent_of(kind) as (parent, child), remote() as other:
        other.ask("pacer = Pacer(name='other')")
        wait_until(lambda: listed() == ["parent", "other"], 10)

        parent.kill()
        killed = time.monotonic()
        # Freed, not only dead: nothing of it is left in the segment.
        wait_until(lambda: [peer.name for peer in peers().peers] == ["other"], 10)

        assert time.monotonic() - killed < 3.0
        os.kill(child, 0)
        assert other.ask("newcomer = Pacer(name='next')\nslot = newcomer.slot") is None
        assert other.ask("slot") == 0


@pytest.mark.parametrize("kind", CHILDREN)
def test_a_child_has_no_file_of_the_registry_open(kind: str) -> None:
    with parent_of(kind) as (parent, child):
        assert open_files(parent.pid) != []

        # The parent may have answered before the child ran at all.
        wait_until(lambda: open_files(child) == [], 10)


@pytest.mark.parametrize("what", ["pacer = Pacer()", "lease = Lease(); lease.acquire(timeout=0)"])
def test_every_file_that_ocgpu_opens_is_closed_by_an_exec(what: str) -> None:
    with remote() as process:
        process.ask(what)
        files = process.ask(
            "[[os.readlink(f'/proc/self/fd/{fd}'), os.get_inheritable(int(fd))]"
            " for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}')]"
        )

    ours = [name for name, _ in files if os.environ["OCGPU_DIR"] in name]
    assert ours
    assert [name for name, inheritable in files if inheritable and name in ours] == []


def test_an_exec_frees_the_slot() -> None:
    with remote() as process, remote() as other:
        process.ask("pacer = Pacer(name='executes')")
        other.ask("pacer = Pacer(name='other')")
        assert listed() == ["executes", "other"]

        assert process.process.stdin is not None
        process.process.stdin.write(b"\"os.execv('/bin/sleep', ['sleep', '60'])\"\n")
        process.process.stdin.flush()
        told = time.monotonic()
        wait_until(lambda: [peer.name for peer in peers().peers] == ["other"], 30)

        assert time.monotonic() - told < 3.0
        assert process.process.poll() is None


def test_a_forked_child_gets_a_slot_of_its_own_at_its_first_step() -> None:
    with remote() as parent:
        parent.ask("pacer = Pacer(2.0, 'both')")
        parent.ask(
            "told, tell = os.pipe()\n"
            "go, ready = os.pipe()\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    pacer.step()\n"
            "    os.write(tell, str(pacer.slot).encode())\n"
            "    os.read(go, 1)\n"
            "    os._exit(0)\n"
        )
        slot = parent.ask("os.read(told, 10).decode()")

        assert parent.ask("pacer.slot") == 0
        assert slot == "1"
        seen = parent.ask("[[p.name, p.pid, p.slot, p.weight] for p in pacer.snapshot().peers]")
        assert seen == [["both", parent.ask("child"), 1, 2.0]]

        parent.ask("os.write(ready, b'x')\nos.waitpid(child, 0)")
        wait_until(lambda: [peer.pid for peer in peers().peers] == [parent.pid], 10)
