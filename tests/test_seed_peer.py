"""Beside a peer that was written from the seed's description alone."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from ocgpu import Pacer, peers
from ocgpu.simulators.gpu_worker import step_bytes
from tests.seed_peer import SeedPrograms, seed_peer, seen
from tests.sharers import Sharer, sharers
from tests.waiting import wait_until

STEP_BYTES = str(64 * 1024)
OURS = ["--name", "ours", "--weight", "2", "--step-bytes", STEP_BYTES]
BOTH_ACTIVE = {"ours": (2.0, 66.67), "seed": (1.0, 33.33)}


@pytest.fixture
def segment(gpu_dir: Path, gpu_key: str) -> Path:
    """Where glibc's `shm_open` would find the segment."""
    return gpu_dir / f"opencoti-gpu-{gpu_key}"


@contextmanager
def stopped(process: Sharer) -> Iterator[None]:
    """The process is stopped inside the block."""
    process.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.process.send_signal(signal.SIGCONT)


def look() -> dict[str, tuple[float, float]]:
    return seen(peers().to_dict())


def slots() -> dict[int, str]:
    """Who has which slot, by our own reading."""
    return {peer.slot: peer.name for peer in peers().peers}


def rates(workers: list[Sharer], seconds: float) -> list[float]:
    """Steps a second of several workers over one span."""
    before = [(worker.steps(), time.monotonic()) for worker in workers]
    deadline = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= deadline, seconds + 10)
    after = [(worker.steps(), time.monotonic()) for worker in workers]
    return [
        (late[0] - early[0]) / (late[1] - early[1])
        for early, late in zip(before, after, strict=True)
    ]


def work(*workers: Sharer) -> None:
    for worker in workers:
        worker.tell("work")


def test_a_peer_of_the_seed_that_created_the_segment_is_joined(
    seed_programs: SeedPrograms, segment: Path
) -> None:
    with seed_peer(seed_programs, segment) as theirs:
        created = segment.stat().st_ino
        with sharers(OURS) as (ours,):
            work(theirs, ours)

            wait_until(lambda: seen(ours.snapshot()) == BOTH_ACTIVE, 10)
            wait_until(lambda: seen(theirs.snapshot()) == BOTH_ACTIVE, 10)
            assert {path.stat().st_ino for path in segment.parent.iterdir()} == {created}
            assert slots() == {0: "seed", 1: "ours"}


def test_a_peer_of_the_seed_joins_the_segment_that_ocgpu_created(
    seed_programs: SeedPrograms, segment: Path
) -> None:
    with sharers(OURS) as (ours,), seed_peer(seed_programs, segment) as theirs:
        work(theirs, ours)

        wait_until(lambda: seen(ours.snapshot()) == BOTH_ACTIVE, 10)
        wait_until(lambda: seen(theirs.snapshot()) == BOTH_ACTIVE, 10)
        assert slots() == {0: "ours", 1: "seed"}


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_cosmopolitan_peer_is_met_under_the_hashed_name(
    seed_programs: SeedPrograms, gpu_dir: Path, monkeypatch: pytest.MonkeyPatch, *, ours_first: bool
) -> None:
    monkeypatch.setenv("OCGPU_GPU_KEY", "metal-0")
    # BLAKE2b-256 of `/opencoti-gpu-metal-0`, as Cosmopolitan's libc/calls/shm_path_np.c names it.
    name = "cb197ce2155862306e88937979e9708a186916bc14243a9c60cb9e266efa04fc.sem"

    with (
        Pacer(name="early") if ours_first else nullcontext(),
        seed_peer(seed_programs, gpu_dir / name) as theirs,
        Pacer(2.0, "ours"),
    ):
        expected = {"seed", "ours"} | ({"early"} if ours_first else set())
        assert set(look()) == set(seen(theirs.snapshot())) == expected

    assert {path.name for path in gpu_dir.iterdir()} == {name, "opencoti-gpu-metal-0"}


def test_peers_of_the_seed_under_both_names_meet(
    seed_programs: SeedPrograms, segment: Path
) -> None:
    with Pacer(name="ours"):
        hashed = next(path for path in segment.parent.iterdir() if path.suffix == ".sem")

        with (
            seed_peer(seed_programs, segment, "--name", "glibc") as glibc,
            seed_peer(seed_programs, hashed, "--name", "cosmopolitan") as cosmopolitan,
        ):
            for theirs in (glibc, cosmopolitan):
                assert set(seen(theirs.snapshot())) == {"ours", "glibc", "cosmopolitan"}


def test_what_a_peer_of_the_seed_sees_of_us_follows_our_weight_name_and_activity(
    seed_programs: SeedPrograms, segment: Path
) -> None:
    with Pacer(2.0, "müller" * 10) as ours, seed_peer(seed_programs, segment) as theirs:
        # 47 bytes, cut between two characters.
        name = ("müller" * 10).encode()[:47].decode()
        assert [peer["name"] for peer in theirs.snapshot()["peers"]] == [name]

        with ours.request():
            work(theirs)
            wait_until(lambda: seen(theirs.snapshot())["seed"] == (1.0, 33.33), 10)
            ours.weight = 3.0
            assert seen(theirs.snapshot()) == {name: (3.0, 75.0), "seed": (1.0, 25.0)}

        assert seen(theirs.snapshot()) == {name: (3.0, 0.0), "seed": (1.0, 100.0)}


# 10 % beside 99.01 % and beside 99.9 %, renormalised.
@pytest.mark.parametrize(("weight", "floor"), [(0.01, 9.17), (1000.0, 9.1)])
def test_both_give_the_smaller_one_the_floor_of_ten_percent(
    seed_programs: SeedPrograms, segment: Path, weight: float, floor: float
) -> None:
    with (
        Pacer(1.0, "ours") as ours,
        ours.request(),
        seed_peer(seed_programs, segment, "--weight", str(weight)) as theirs,
    ):
        work(theirs)
        wait_until(lambda: look()["seed"][1] > 0.0, 10)

        wait_until(lambda: seen(theirs.snapshot()) == look(), 10)
        assert min(share for _, share in look().values()) == floor


def test_a_peer_of_the_seed_that_idles_leaves_the_schedule_after_2_seconds(
    seed_programs: SeedPrograms, segment: Path
) -> None:
    with (
        Pacer(1.0, "ours") as ours,
        ours.request(),
        seed_peer(seed_programs, segment) as theirs,
    ):
        work(theirs)
        wait_until(lambda: look()["ours"][1] == 50.0, 10)

        theirs.tell("idle")
        wait_until(lambda: look()["ours"][1] == 100.0, 20)

        assert look()["seed"] == (1.0, 0.0)
        assert ours.step() == 0.0


def test_a_killed_peer_of_ours_is_gone_from_the_seeds_view_within_3_seconds(
    seed_programs: SeedPrograms, segment: Path
) -> None:
    with Pacer(name="other"), sharers(OURS) as (ours,), seed_peer(seed_programs, segment) as theirs:
        work(ours, theirs)
        wait_until(lambda: "ours" in seen(theirs.snapshot()), 10)

        ours.process.kill()
        killed = time.monotonic()
        # Not only aged out: another peer of ours frees the slot, so nothing of it is listed.
        wait_until(lambda: {peer["name"] for peer in theirs.snapshot()["peers"]} == {"other"}, 30)

        assert time.monotonic() - killed < 3.0


def test_a_killed_peer_of_the_seed_is_gone_and_its_slot_is_taken_again(
    seed_programs: SeedPrograms, segment: Path
) -> None:
    with seed_peer(seed_programs, segment) as theirs, Pacer(name="ours") as ours, ours.request():
        work(theirs)
        wait_until(lambda: look()["ours"][1] == 50.0, 10)

        theirs.process.kill()
        wait_until(lambda: "seed" not in look(), 20)
        assert look() == {"ours": (1.0, 100.0)}

        # Not at once, because one that was stopped may go on; but as soon as somebody needs it.
        with ExitStack() as joined:
            for _ in range(14):
                joined.enter_context(Pacer(name="full"))
            newcomer = joined.enter_context(Pacer(name="next"))
            wait_until(lambda: newcomer.slot == 0, 20, "the dead peer's slot")


def test_a_stopped_peer_of_the_seed_is_back_after_5_seconds_and_no_slot_has_two_owners(
    seed_programs: SeedPrograms, segment: Path
) -> None:
    with (
        seed_peer(seed_programs, segment) as theirs,
        Pacer(name="ours") as ours,
        ours.request(),
    ):
        work(theirs)
        wait_until(lambda: look()["ours"][1] == 50.0, 10)

        with stopped(theirs):
            deadline = time.monotonic() + 5.0
            wait_until(lambda: time.monotonic() > deadline, 10)
            assert look()["ours"] == (1.0, 100.0)
            with Pacer(name="newcomer") as newcomer:
                assert newcomer.slot != ours.slot

        wait_until(
            lambda: seen(theirs.snapshot()) == look() == {"ours": (1.0, 50.0), "seed": (1.0, 50.0)},
            10,
        )
        assert sorted(slots().values()) == ["ours", "seed"]


def test_a_peer_of_the_seed_that_never_looks_back_keeps_its_slot_through_a_stop(
    seed_programs: SeedPrograms, segment: Path
) -> None:
    with (
        seed_peer(seed_programs, segment, "--stubborn") as theirs,
        Pacer(name="ours") as ours,
        ours.request(),
    ):
        work(theirs)
        wait_until(lambda: look()["ours"][1] == 50.0, 10)

        with stopped(theirs):
            deadline = time.monotonic() + 5.0
            wait_until(lambda: time.monotonic() > deadline, 10)

        wait_until(lambda: look() == {"ours": (1.0, 50.0), "seed": (1.0, 50.0)}, 4)


def test_a_peer_of_ours_whose_slot_was_taken_while_it_was_stopped_moves_to_another(
    seed_programs: SeedPrograms, segment: Path
) -> None:
    with sharers(OURS) as (ours,):
        work(ours)
        wait_until(lambda: look().get("ours") == (2.0, 100.0), 10)
        with stopped(ours):
            wait_until(lambda: peers().peers[0].heartbeat_age_ms > 3100, 10)
            with seed_peer(seed_programs, segment, "--stubborn") as thief:
                work(thief)
                assert slots() == {0: "seed"}

                ours.process.send_signal(signal.SIGCONT)

                wait_until(lambda: seen(thief.snapshot()) == BOTH_ACTIVE, 10)
                wait_until(lambda: seen(ours.snapshot()) == BOTH_ACTIVE, 10)
                assert slots() == {0: "seed", 1: "ours"}
                assert thief.snapshot()["self"]["pid"] == thief.pid
                assert ours.snapshot()["self"]["pid"] == ours.pid


@pytest.mark.contended
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("our_weight", "their_weight"), [("2", "1"), ("1", "2")])
def test_beside_a_peer_of_the_seed_a_contended_core_is_split_by_weight_within_20_percent(
    seed_programs: SeedPrograms, segment: Path, our_weight: str, their_weight: str
) -> None:
    core = str(max(os.sched_getaffinity(0)))
    size = str(step_bytes(0.009))
    line = ["--name", "ours", "--weight", our_weight, "--core", core, "--step-bytes", size]
    theirs_line = ("--weight", their_weight, "--core", core, "--step-ms", "9")

    with sharers(line) as (ours,), seed_peer(seed_programs, segment, *theirs_line) as theirs:
        work(ours, theirs)
        wait_until(lambda: min(share for _, share in look().values()) == 33.33, 10)
        our_rate, their_rate = rates([ours, theirs], 6.0)

    expected = float(our_weight) / float(their_weight)
    assert our_rate / their_rate == pytest.approx(expected, rel=0.2)
