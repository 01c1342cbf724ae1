"""The lease as the registry shows it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ocgpu import Lease, Pacer, peers
from tests.holders import holder
from tests.processes import run_forking
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")


def shown() -> list[str | None]:
    return [peer.lease for peer in peers().peers]


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_pacer_shows_the_lease_of_its_process(mode: str) -> None:
    lease = Lease(mode=mode)  # type: ignore[arg-type]
    with Pacer():
        before = shown()
        with lease:
            during = shown()
        after = shown()

    assert (before, during, after) == ([None], [mode], [None])


def test_a_pacer_made_under_a_lease_shows_it_and_two_show_the_stronger() -> None:
    with Lease(mode="shared"), Lease(mode="shared") as other, Pacer():
        other.release()
        assert shown() == ["shared"]
    with Lease("another-gpu"), Pacer():
        assert shown() == [None]


async def test_waiting_asynchronously_shows_it_too() -> None:
    with Pacer():
        async with Lease():
            assert shown() == ["exclusive"]
        assert shown() == [None]


def test_a_forgotten_lease_is_shown_no_longer() -> None:
    with Pacer():
        lease = Lease()
        lease.acquire()
        del lease

        assert shown() == [None]


def test_a_pacer_that_moves_to_a_new_segment_still_shows_it(gpu_dir: Path) -> None:
    with Lease(), Pacer():
        for segment in gpu_dir.glob("*opencoti*"):
            segment.unlink()
        for segment in gpu_dir.glob("*.sem"):
            segment.unlink()

        wait_until(lambda: shown() == ["exclusive"])


def test_a_forked_child_that_joins_shows_no_lease() -> None:
    code = (
        "import os, ocgpu\n"
        "lease, pacer = ocgpu.Lease(), ocgpu.Pacer()\n"
        "lease.acquire()\n"
        "if (child := os.fork()) == 0:\n"
        "    pacer.step(); lease.release()\n"
        "    print([peer.lease for peer in ocgpu.peers().peers], flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(pacer.snapshot().self.lease)\n"
    )
    done = run_forking(code)

    assert done.stdout == "['exclusive', None]\nexclusive\n", done.stderr


def test_a_holder_without_a_slot_stands_under_lease() -> None:
    with holder() as other:
        done = subprocess.run(
            [sys.executable, "-m", "ocgpu", "peers", "--json"],
            capture_output=True,
            text=True,
            check=True,
        )

    document = json.loads(done.stdout)
    assert document["peers"] == []
    assert [party["pid"] for party in document["lease"]["holders"]] == [other.pid]
    assert other.pid != os.getpid()
