"""`Pacer` and `peers` in one process."""

import logging
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ocgpu
from ocgpu import Pacer
from tests.at_work import at_work
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")


def test_alone_a_step_never_sleeps() -> None:
    with Pacer() as pacer:
        assert [pacer.step() for _ in range(1000)] == [0.0] * 1000


def test_idle_peers_cost_nothing() -> None:
    with Pacer() as pacer, Pacer(), Pacer():
        assert [pacer.step() for _ in range(1000)] == [0.0] * 1000


@pytest.mark.parametrize("schedule", ["turn", "grid"])
def test_beside_a_peer_at_work_a_step_waits_for_its_turn(schedule: str) -> None:
    with Pacer(schedule=schedule) as pacer, Pacer() as other, at_work(other):
        slept = []
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            slept.append(pacer.step())
            pacer.done()

        # 1:1 is a round of about 80 ms: in 2 s many turns of the other's pass, each of about 40 ms.
        assert sum(s > 0.02 for s in slept) >= 5
        assert pacer.snapshot().schedule == schedule


def test_on_the_grid_the_first_step_of_a_request_returns_at_once() -> None:
    with Pacer(schedule="grid") as pacer, Pacer() as other:
        other._open_request()

        # Longer than any period, so that windows of the other's pass.
        deadline = time.monotonic() + 0.5
        first = set()
        while time.monotonic() < deadline:
            with pacer.request():
                first.add(pacer.step())

        assert first == {0.0}


def test_a_peer_of_the_grid_at_work_puts_all_on_the_grid() -> None:
    with Pacer() as pacer, Pacer(schedule="grid") as other:
        before = pacer.snapshot().schedule
        with other.request():
            during = (pacer.snapshot().schedule, ocgpu.peers().schedule)

        assert (before, during, pacer.snapshot().schedule) == ("turn", ("grid", "grid"), "turn")


def test_a_peer_that_stops_hands_over_at_once() -> None:
    with Pacer() as pacer, Pacer() as other:
        other.step()  # Its turn: without an end of its request it is 100 ms until it is taken.
        threading.Timer(0.02, other.idle).start()

        slept = pacer.step()

        assert 0.0 < slept < 0.09


def test_a_turn_that_nobody_ends_is_taken() -> None:
    with Pacer() as pacer, Pacer() as other:
        other.step()

        assert 0.05 < pacer.step() < 3.0


def test_the_end_of_a_request_is_seen_by_the_others_at_once() -> None:
    with Pacer() as pacer, Pacer() as other:
        with other.request():
            assert [peer.active for peer in pacer.snapshot().peers] == [True]

        assert [peer.active for peer in pacer.snapshot().peers] == [False]


def test_two_seconds_of_silence_close_a_request() -> None:
    with Pacer() as pacer, Pacer() as other:
        other.step()
        assert pacer.snapshot().peers[0].active

        wait_until(lambda: not pacer.snapshot().peers[0].active, 20)


def test_weight_changes_while_running() -> None:
    with Pacer() as pacer, Pacer() as other, pacer.request(), other.request():
        other.weight = 3.0

        assert pacer.snapshot().peers[0].weight == 3.0
        assert pacer.snapshot().peers[0].share == pytest.approx(0.75)
        assert pacer.snapshot().self is not None


def test_remaining_is_unlimited_alone_and_within_the_turn_beside_others() -> None:
    with Pacer() as pacer, Pacer() as other:
        assert pacer.remaining() == math.inf

        with other.request():
            assert pacer.remaining() == 0.0
            pacer.step()
            assert 0.0 < pacer.remaining() <= 0.05


def test_busy_is_the_time_between_step_and_done() -> None:
    with Pacer() as pacer:
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            pacer.step()
            while time.monotonic() % 0.02 < 0.01:
                pass
            pacer.done()
            wait_until(lambda: time.monotonic() % 0.02 < 0.01 or time.monotonic() > deadline)

        own = pacer.snapshot().self
        assert own is not None
        assert 0.2 < own.busy < 0.8


def test_a_peer_sees_names_weights_and_its_own_slot() -> None:
    with Pacer(2.0, "chat") as pacer, Pacer(0.5, "train"):
        snapshot = pacer.snapshot()

        assert snapshot.self is not None
        assert (snapshot.self.name, snapshot.self.pid) == ("chat", os.getpid())
        assert [(peer.name, peer.weight, peer.slot) for peer in snapshot.peers] == [
            ("train", 0.5, 1)
        ]


def test_to_json_has_the_seeds_schema() -> None:
    with Pacer(2.0, "a") as pacer, Pacer(1.0, "b"), pacer.request():
        document = pacer.snapshot().to_dict()

    assert set(document) >= {"gpu_key", "self", "peers"}
    seed = {"pid", "name", "weight", "share_pct", "busy_pct", "active"}
    assert set(document["self"]) >= seed
    assert set(document["peers"][0]) >= seed | {"heartbeat_age_ms"}
    assert document["self"]["share_pct"] == 100.0


def test_peers_looks_without_joining() -> None:
    with Pacer(name="only"):
        snapshot = ocgpu.peers()

        assert snapshot.self is None
        assert [peer.name for peer in snapshot.peers] == ["only"]
        assert len(ocgpu.peers().peers) == 1


def test_peers_of_a_gpu_that_nobody_used_creates_nothing(gpu_dir: Path) -> None:
    assert ocgpu.peers("nobody").peers == []
    assert list(gpu_dir.iterdir()) == []


def test_the_seventeenth_peer_joins_when_a_slot_is_free() -> None:
    sixteen = [Pacer() for _ in range(16)]
    late = Pacer()
    assert not late.enabled
    assert "16 slots" in str(late.reason)
    assert [late.step() for _ in range(100)] == [0.0] * 100  # Nobody is at work.

    sixteen[3].leave()
    wait_until(lambda: late.enabled, 10)

    assert late.slot == 3
    for pacer in (*sixteen, late):
        pacer.leave()


def test_the_seventeenth_peer_holds_back_while_anybody_is_at_work() -> None:
    sixteen = [Pacer() for _ in range(16)]
    late = Pacer()
    with sixteen[0].request():
        late.step()
        deadline = time.monotonic() + 0.01
        wait_until(lambda: time.monotonic() >= deadline)
        late.done()

        # Nine times its unit, as if it had a share of 10 %.
        assert 0.09 <= late.step() < 3.0
    for pacer in (*sixteen, late):
        pacer.leave()


def test_leaving_twice_is_harmless_and_a_left_pacer_never_sleeps() -> None:
    pacer = Pacer()
    pacer.leave()
    pacer.leave()

    assert not pacer.enabled
    assert pacer.step() == 0.0
    assert ocgpu.peers().peers == []


def test_a_dropped_pacer_leaves() -> None:
    pacer = Pacer()
    assert len(ocgpu.peers().peers) == 1

    del pacer

    assert ocgpu.peers().peers == []


def test_ctrl_c_ends_a_wait_at_the_gate() -> None:
    program = (
        "import os, signal, threading\n"
        "from ocgpu import Pacer\n"
        "a, b = Pacer(1000.0, schedule='grid'), Pacer(0.001)\n"
        "a._open_request(); b.step()\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "def loop():\n"
        "    while True: b.step()\n"
        "try: loop()\n"  # A function: CPython 3.11 does not cover the jump back within the `try`.
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20
    )

    assert done.stdout == "interrupted\n"


def test_joining_logs_the_boot_line(caplog: pytest.LogCaptureFixture, gpu_key: str) -> None:
    with Pacer(), caplog.at_level(logging.INFO, "ocgpu"), Pacer(1.5):
        pass

    line = f"gpu-share: joined /opencoti-gpu-{gpu_key} slot 1 (weight 1.5, 1 peers alive)"
    assert caplog.messages == [line]
