"""What sharing costs, each figure beside its floor or a peer in the same run."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from ocgpu import Pacer

# The 88 bytes of a slot that every peer publishes, natural C alignment (rust/core/src/layout.rs).
SLOT = struct.Struct("<I4xqfIqI48s4x")
SLOTS_AT = 16
SLOT_COUNT = 16


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCGPU_DIR", str(tmp_path))
    monkeypatch.setenv("OCGPU_GPU_KEY", "bench")
    return tmp_path


@pytest.fixture
def idle_peers() -> Iterator[list[Pacer]]:
    peers = [Pacer(name=f"idle-{index}") for index in range(SLOT_COUNT - 1)]
    yield peers
    for peer in peers:
        peer.leave()


@pytest.mark.benchmark(group="step: floor is time.time_ns, bar 2x alone, 3x with 15 idle peers")
def test_floor_time_ns(benchmark: BenchmarkFixture) -> None:
    benchmark.pedantic(time.time_ns, rounds=200, iterations=5000, warmup_rounds=5)


@pytest.mark.benchmark(group="step: floor is time.time_ns, bar 2x alone, 3x with 15 idle peers")
def test_step_alone(benchmark: BenchmarkFixture) -> None:
    with Pacer() as pacer:
        benchmark.pedantic(pacer.step, rounds=200, iterations=5000, warmup_rounds=5)


@pytest.mark.benchmark(group="step: floor is time.time_ns, bar 2x alone, 3x with 15 idle peers")
@pytest.mark.usefixtures("idle_peers")
def test_step_beside_15_idle_peers(benchmark: BenchmarkFixture) -> None:
    with Pacer() as pacer:
        benchmark.pedantic(pacer.step, rounds=200, iterations=5000, warmup_rounds=5)


@pytest.mark.benchmark(group="snapshot of 16 peers to JSON: peer is struct + json, bar 1/5")
@pytest.mark.usefixtures("idle_peers")
def test_peer_struct_and_json(benchmark: BenchmarkFixture, place: Path) -> None:
    with Pacer():
        segment = (place / "opencoti-gpu-bench").read_bytes()

    def unpack() -> str:
        slots = SLOT.iter_unpack(segment[SLOTS_AT : SLOTS_AT + SLOT_COUNT * SLOT.size])
        peers = [
            {
                "pid": pid,
                "name": name.split(b"\0")[0].decode(errors="replace"),
                "weight": weight,
                "active": bool(active),
                "heartbeat_us": heartbeat_us,
                "busy_pct": busy_ppm / 10_000,
                "boot_us": boot_us,
            }
            for pid, boot_us, weight, active, heartbeat_us, busy_ppm, name in slots
        ]
        return json.dumps({"peers": peers})

    benchmark.pedantic(unpack, rounds=100, iterations=100, warmup_rounds=5)


@pytest.mark.benchmark(group="snapshot of 16 peers to JSON: peer is struct + json, bar 1/5")
@pytest.mark.usefixtures("idle_peers")
def test_snapshot_to_json(benchmark: BenchmarkFixture) -> None:
    with Pacer() as pacer:
        benchmark.pedantic(
            lambda: pacer.snapshot().to_json(), rounds=100, iterations=100, warmup_rounds=5
        )


@pytest.mark.benchmark(group="join and leave")
def test_join_and_leave(benchmark: BenchmarkFixture) -> None:
    benchmark.pedantic(lambda: Pacer().leave(), rounds=200, iterations=1, warmup_rounds=5)
