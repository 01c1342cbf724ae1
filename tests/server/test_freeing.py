"""An image job and the memory around it: nobody is let in before it was seen to be free."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes import Engines
from tests.fakes.nvml import GIB, FakeNvml, Process, three_gpus
from tests.server.client import background
from tests.server.jobs import assert_in_order, chat, hold_an_image
from tests.server.script import Bench, Script
from tests.server.served import Served
from tests.waiting import wait_until

Make = Callable[..., Bench]
Serve = Callable[..., Served]

# A driver for a process of its own: one card, whose processes stand in a file.
PYNVML = """
import json, pathlib, types
PLACE = pathlib.Path(__file__).with_name("memory.json")
class NVMLError(Exception): pass
NVML_DEVICE_MIG_ENABLE = 1
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return "card"
def nvmlDeviceGetUUID(card): return "GPU-aaaa"
def nvmlDeviceGetName(card): return "card"
def nvmlDeviceGetMigMode(card): return [0, 0]
def nvmlDeviceGetMemoryInfo(card): return types.SimpleNamespace(total=2**34, free=0, used=2**34)
def nvmlDeviceGetGraphicsRunningProcesses(card): return []
def nvmlDeviceGetComputeRunningProcesses(card):
    held = json.loads(PLACE.read_text())
    return [types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in held]
"""


class Driver:
    """The driver of a `serve`; the engines listen in this process, so the memory is this one's."""

    def __init__(self, folder: Path) -> None:
        self._place = folder / "memory.json"
        (folder / "pynvml.py").write_text(PYNVML)
        self.hold(0)
        self.path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"

    def hold(self, size: int) -> None:
        new = self._place.with_suffix(".new")
        new.write_text(json.dumps([[os.getpid(), size], [1, 7 * GIB]]))
        new.rename(self._place)


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    folder = tmp_path / "driver"
    folder.mkdir()
    return Driver(folder)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = three_gpus()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_a_chat_waits_until_the_images_memory_was_seen_to_be_free(
    engines: Engines, serve: Serve, driver: Driver
) -> None:
    served = serve(PYTHONPATH=driver.path, SETTLE_TIMEOUT="20s")
    nodes = hold_an_image(engines, served)
    waiting = background(lambda: chat(served))
    served.wait_waiting("llm", 1)
    driver.hold(6 * GIB)

    nodes.open()
    wait_until(lambda: engines.record.calls("POST /free"), what="/free")
    assert served.health()["state"] == "image"
    assert engines.record.calls("POST /api/chat") == []
    driver.hold(450 << 20)

    assert waiting.result().status == 200
    assert_in_order(engines, "POST /free", "POST /api/chat")
    assert served.metrics()["gpulock_settle_seconds_count"] == 1
    settled = next(line for line in served.lines() if line["message"] == "memory settled")
    assert (settled["before_mib"], settled["after_mib"]) == (6144, 450)


def test_memory_that_stays_delays_a_chat_by_the_time_out_only(
    engines: Engines, serve: Serve, driver: Driver
) -> None:
    served = serve(PYTHONPATH=driver.path, SETTLE_TIMEOUT="200ms")
    nodes = hold_an_image(engines, served)
    driver.hold(6 * GIB)

    nodes.open()

    assert chat(served).status == 200
    assert any(line["message"] == "memory was not freed, going on" for line in served.lines())


async def test_a_model_that_was_being_loaded_is_unloaded_once_it_is_listed(
    script: Script, make: Make, nvml: FakeNvml
) -> None:
    bench = make(settle_timeout=0.3)
    nvml.cards[0].computing = [Process(os.getpid(), 5 * GIB)]
    script.comes = "m"

    await bench.post()

    assert script.calls.index("POST /api/generate") < script.calls.index("POST /prompt")
    assert script.models == []
    await bench.idle()


async def test_an_empty_ollama_without_memory_is_looked_at_once(
    script: Script, make: Make, nvml: FakeNvml
) -> None:
    bench = make(settle_timeout=10.0)
    nvml.cards[0].computing = [Process(1, 5 * GIB)]

    await bench.post()

    assert script.count("GET /api/ps") == 1
    await bench.idle()


async def test_models_that_stay_are_not_waited_for_a_second_time(
    script: Script, make: Make, nvml: FakeNvml
) -> None:
    bench = make(unload_timeout=0.2, settle_timeout=15.0)
    nvml.cards[0].computing = [Process(os.getpid(), 5 * GIB)]
    script.stuck = ["m"]

    async with asyncio.timeout(10):
        await bench.post()

    assert bench.metrics.unload_timeouts == 1
    nvml.cards[0].computing = []
    await bench.idle()


async def test_an_engine_without_a_list_keeps_its_memory_and_is_not_waited_for(
    script: Script, make: Make, nvml: FakeNvml
) -> None:
    bench = make(settle_timeout=15.0)
    nvml.cards[0].computing = [Process(os.getpid(), 5 * GIB)]
    script.listless = True

    async with asyncio.timeout(10):
        await bench.post()

    assert bench.metrics.unload_timeouts == 0
    nvml.cards[0].computing = []
    await bench.idle()


async def test_a_comfyui_that_holds_its_context_only_is_not_waited_for(
    make: Make, nvml: FakeNvml
) -> None:
    bench = make(settle_timeout=15.0)
    nvml.cards[0].computing = [Process(os.getpid(), 450 << 20)]

    async with asyncio.timeout(5):
        assert await bench.jobs.card.free_images()
