"""How the processes of one GPU share it, with real processes on one contended core."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ocgpu.pacer import peers
from tests.sharers import Device, Peer, Sharer, settle, sharers, shares, targets
from tests.traces import waiting
from tests.waiting import wait_until

STEP_BYTES = str(64 * 1024)
MEASURED_S = 5.0
SPLITS = {
    "2:1, 8 ms": [Peer(2, 8), Peer(1, 8)],
    "1:1, 8 ms": [Peer(1, 8), Peer(1, 8)],
    "2:1:1, 8 ms": [Peer(2, 8), Peer(1, 8), Peer(1, 8)],
    "4:1, 8 ms": [Peer(4, 8), Peer(1, 8)],
    "1x8, 8 ms": [Peer(1, 8)] * 8,
    "1:1, 8 and 30 ms": [Peer(1, 8), Peer(1, 30)],
    "2:1, 8 and 30 ms": [Peer(2, 8), Peer(1, 30)],
    "2:1, 30 and 8 ms": [Peer(2, 30), Peer(1, 8)],
    "4:1, 8 and 30 ms": [Peer(4, 8), Peer(1, 30)],
    "1:1, decode and prefill": [Peer(1, 8), Peer(1, 8, prefill_ms=300, steps=60)],
}
EQUAL = ("2:1, 8 ms", "1:1, 8 ms")


@pytest.fixture
def device() -> Iterator[Device]:
    with Device() as device:
        yield device


@pytest.fixture
def turn(gpu_dir: Path, gpu_key: str) -> str:
    return "turn"


def shares_of_others(sharer: Sharer) -> dict[str, float]:
    return {
        peer["name"]: peer["share_pct"]
        for peer in sharer.snapshot()["peers"]
        if peer["active"] and peer["alive"]
    }


def split(device: Device, members: list[Peer], schedule: str) -> list[float]:
    """The measured share of each peer while all of them have work."""
    with sharers(*device.commands(members, schedule)) as workers:
        settle(workers)
        assert {worker.snapshot()["schedule"] for worker in workers} == {schedule}
        return shares(workers, MEASURED_S)


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


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_a_worker_that_hangs_makes_no_step_and_keeps_its_heartbeat() -> None:
    with sharers(["--name", "a", "--step-bytes", STEP_BYTES]) as (a,):
        a.tell("work")
        wait_until(lambda: a.steps() > 0, 10)

        a.hang()
        steps = len(a.trace().steps)
        heartbeat = peers().peers[0]

        assert steps == 0, "without `--trace` nothing is kept"
        assert heartbeat.alive
        seen = a.steps()
        wait_until(lambda: peers().peers[0].heartbeat_age_ms < heartbeat.heartbeat_age_ms, 10)
        assert a.steps() == seen


@pytest.mark.contended
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", SPLITS)
def test_turns_split_a_contended_core_by_weight_within_20_percent(
    device: Device, turn: str, case: str
) -> None:
    measured = split(device, SPLITS[case], turn)

    assert measured == pytest.approx(targets(SPLITS[case]), rel=0.2)


@pytest.mark.contended
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["1:1, 8 and 30 ms", "1:1, decode and prefill"])
def test_turns_split_a_queue_by_weight_within_20_percent(
    gpu_dir: Path, turn: str, case: str
) -> None:
    with Device(gpu_dir / "queue") as device:
        measured = split(device, SPLITS[case], turn)

    assert measured == pytest.approx(targets(SPLITS[case]), rel=0.2)


@pytest.mark.contended
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("gpu_dir", "gpu_key")
@pytest.mark.parametrize("case", EQUAL)
def test_the_grid_splits_equal_short_steps_by_weight_within_20_percent(
    device: Device, case: str
) -> None:
    measured = split(device, SPLITS[case], "grid")

    assert measured == pytest.approx(targets(SPLITS[case]), rel=0.2)


@pytest.mark.contended
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_the_grid_gives_the_longer_steps_more_than_their_share_on_a_sliced_core(
    device: Device,
) -> None:
    # A window ends with the step that is under way: why there is a schedule of turns.
    _, longer = split(device, SPLITS["2:1, 8 and 30 ms"], "grid")

    assert longer > 1 / 3 * 1.2


@pytest.mark.contended
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("gpu_key")
def test_the_grid_gives_the_longer_steps_more_than_their_share_on_a_queue(gpu_dir: Path) -> None:
    with Device(gpu_dir / "queue") as device:
        _, longer = split(device, SPLITS["1:1, 8 and 30 ms"], "grid")

    assert longer > 1 / 2 * 1.2


@pytest.mark.contended
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_who_stays_waits_for_nobody_2_seconds_after_the_other_has_idled(device: Device) -> None:
    with sharers(*device.commands([Peer(1, 8), Peer(1, 8)], "grid")) as (a, b):
        settle([a, b])
        shared = waits(a, time.monotonic())
        b.tell("idle")
        again = waits(a, time.monotonic() + 2.0)

    assert shared > 0.1
    assert again < 0.2


def kill(sharer: Sharer) -> None:
    sharer.process.kill()


def stop(sharer: Sharer) -> None:
    sharer.process.send_signal(signal.SIGSTOP)


def hang(sharer: Sharer) -> None:
    sharer.hang()


@pytest.mark.contended
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", [kill, stop, hang])
def test_in_turns_the_survivor_of_a_fault_waits_for_nobody_2_seconds_later(
    device: Device, turn: str, fault: Callable[[Sharer], None]
) -> None:
    with sharers(*device.commands([Peer(1, 8), Peer(1, 8)], turn)) as (a, b):
        settle([a, b])
        shared = waits(a, time.monotonic())
        fault(b)
        again = waits(a, time.monotonic() + 2.0)

    assert shared > 0.1
    assert again < 0.2


@pytest.mark.contended
@pytest.mark.timeout(120)
def test_in_turns_a_continued_process_has_its_share_again(device: Device, turn: str) -> None:
    with sharers(*device.commands([Peer(1, 8), Peer(1, 8)], turn)) as (a, b):
        settle([a, b])
        stop(b)
        alone = waits(a, time.monotonic() + 2.0)

        b.process.send_signal(signal.SIGCONT)
        settle([a, b])
        measured = shares([a, b], MEASURED_S)

    assert alone < 0.2
    assert measured == pytest.approx([0.5, 0.5], rel=0.2)


def waits(sharer: Sharer, moment: float) -> float:
    """The part of the second after a moment that a worker waited; less than 0.2 is 80 % of solo.

    Neighbours on the core stretch the steps and so shrink the part, never below that of one alone,
    which waits for nobody.
    """
    return waiting(sharer.trace(until=moment + 1.0), moment, moment + 1.0)


@pytest.mark.usefixtures("gpu_key")
def test_the_last_one_to_leave_lets_the_segment_stand(gpu_dir: Path, gpu_key: str) -> None:
    with sharers(["--step-bytes", STEP_BYTES]):
        pass

    assert (gpu_dir / f"opencoti-gpu-{gpu_key}").stat().st_size == 4096
