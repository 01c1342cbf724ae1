"""The seed's gates G1 and G2, with real processes."""

import os
import time
from pathlib import Path

import pytest

from ocgpu.pacer import peers
from ocgpu.simulators.gpu_worker import step_bytes
from tests.sharers import Sharer, rates, sharers
from tests.waiting import wait_until

STEP_BYTES = str(64 * 1024)


def shares_of_others(sharer: Sharer) -> dict[str, float]:
    return {
        peer["name"]: peer["share_pct"]
        for peer in sharer.snapshot()["peers"]
        if peer["active"] and peer["alive"]
    }


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_three_processes_see_each_other_with_50_25_25_percent() -> None:
    lines = [
        ["--name", name, "--weight", weight, "--step-bytes", STEP_BYTES]
        for name, weight in (("a", "2"), ("b", "1"), ("c", "1"))
    ]

    with sharers(*lines) as (a, b, c):
        for sharer in (a, b, c):
            sharer.tell("work")

        wait_until(lambda: shares_of_others(a) == {"b": 25.0, "c": 25.0}, 10)
        wait_until(lambda: shares_of_others(b) == {"a": 50.0, "c": 25.0}, 10)
        wait_until(lambda: shares_of_others(c) == {"a": 50.0, "b": 25.0}, 10)
        assert a.snapshot()["self"]["share_pct"] == 50.0


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_a_killed_process_is_gone_from_the_others_view_within_3_seconds() -> None:
    lines = [["--name", name, "--step-bytes", STEP_BYTES] for name in ("a", "b")]

    with sharers(*lines) as (a, b):
        for sharer in (a, b):
            sharer.tell("work")
        wait_until(lambda: shares_of_others(a) == {"b": 50.0}, 10)

        b.process.kill()
        killed = time.monotonic()
        wait_until(lambda: not shares_of_others(a), 30)

        assert time.monotonic() - killed < 3.0
        wait_until(lambda: len(peers().peers) == 1, 3, "the dead peer's slot to be freed")


@pytest.mark.contended
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_two_to_one_splits_a_contended_core_two_to_one_within_20_percent() -> None:
    core = str(max(os.sched_getaffinity(0)))
    size = str(step_bytes(0.009))
    lines = [
        ["--name", name, "--weight", weight, "--core", core, "--step-bytes", size]
        for name, weight in (("two", "2"), ("one", "1"))
    ]

    with sharers(*lines) as (two, one):
        two.tell("work")
        one.tell("work")
        wait_until(lambda: shares_of_others(one) == {"two": 66.6666}, 10)
        fast, slow = rates([two, one], 6.0)

    assert fast / slow == pytest.approx(2.0, rel=0.2)


@pytest.mark.contended
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_the_survivor_is_back_at_its_solo_speed_within_2_seconds_of_the_others_idling() -> None:
    core = str(max(os.sched_getaffinity(0)))
    size = str(step_bytes(0.009))
    lines = [["--name", name, "--core", core, "--step-bytes", size] for name in ("a", "b")]

    with sharers(*lines) as (a, b):
        a.tell("work")
        solo = a.rate(3.0)
        b.tell("work")
        wait_until(lambda: shares_of_others(a) == {"b": 50.0}, 10)
        shared = a.rate(2.0)
        b.tell("idle")
        deadline = time.monotonic() + 2.0
        wait_until(lambda: time.monotonic() >= deadline)
        again = a.rate(3.0)

    # Neighbours on a shared machine make the solo speed itself waver; half of it would be no
    # release at all.
    assert shared < 0.75 * solo
    assert again > 0.8 * solo


@pytest.mark.usefixtures("gpu_key")
def test_the_last_one_to_leave_lets_the_segment_stand(gpu_dir: Path, gpu_key: str) -> None:
    with sharers(["--step-bytes", STEP_BYTES]):
        pass

    assert (gpu_dir / f"opencoti-gpu-{gpu_key}").stat().st_size == 4096
