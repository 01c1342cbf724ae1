"""Freed means measured: real processes that listen, a driver that says what a test wants."""

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import psutil
import pytest

from ocgpu.server import settle
from ocgpu.server.metrics import Metrics
from ocgpu.server.settle import Fall, Settler, Settling
from tests.fakes.nvml import GIB, Card, FakeNvml, Process, three_gpus
from tests.server.local_engine import LocalEngine
from tests.waiting import wait_until

MIB = 1 << 20


@pytest.fixture
def local() -> Iterator[LocalEngine]:
    engine = LocalEngine()
    yield engine
    engine.end()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = three_gpus()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
async def begin(local: LocalEngine) -> AsyncIterator[Callable[..., object]]:
    """Measures the local engine; keywords are of the settler."""
    metrics = Metrics()
    begun: list[Settling] = []

    async def start(*, timeout: float = 20.0, kept: int = 0, url: str = "") -> Settling:
        begun.append(await Settler(timeout, metrics).begin("engine", url or local.url, kept))
        return begun[-1]

    start.metrics = metrics
    yield start
    for settling in begun:
        settling.close()


def observed(metrics: Metrics) -> float:
    return {name: n for name, _, n in metrics.settle.samples({})}["_count"]


def holds(nvml: FakeNvml, pid: int, *sizes: int | None) -> None:
    """Have a process hold so much of the first cards, beside a neighbour that never frees."""
    for card, size in zip(nvml.cards, sizes, strict=False):
        card.computing = [Process(pid, size), Process(os.getpid(), 20 * GIB)]


async def still_waits(waiting: "asyncio.Future[bool]", nvml: FakeNvml) -> None:
    """See several looks at the driver, after which the wait is still on."""
    for _ in range(5):
        before = nvml.reads
        async with asyncio.timeout(10):
            while nvml.reads == before:  # noqa: ASYNC110 - the driver is asked in a thread
                await asyncio.sleep(0.005)
    assert not waiting.done()


async def test_it_waits_until_the_worker_of_the_engine_has_freed_its_memory(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object]
) -> None:
    holds(nvml, local.worker, 6 * GIB, 2 * GIB)
    settling = await begin()
    waiting = asyncio.ensure_future(settling.wait(told=True))
    await still_waits(waiting, nvml)
    holds(nvml, local.worker, 5 * GIB, 0)
    await still_waits(waiting, nvml)

    holds(nvml, local.worker, 300 * MIB, 0)

    assert await waiting
    assert observed(begin.metrics) == 1
    settling.close()
    await asyncio.to_thread(wait_until, lambda: nvml.started == 0)


async def test_a_process_that_has_ended_holds_nothing(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object]
) -> None:
    holds(nvml, local.worker, 6 * GIB)
    settling = await begin()

    nvml.cards[0].computing = []
    psutil.Process(local.worker).kill()

    assert await settling.wait(told=True)


async def test_memory_that_stays_is_told_and_held_for_the_time_out_only(
    local: LocalEngine,
    nvml: FakeNvml,
    begin: Callable[..., object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    holds(nvml, local.worker, 6 * GIB)
    settling = await begin(timeout=0.3)

    assert not await settling.wait(told=True)

    warning = caplog.records[-1].__dict__
    assert warning["message"] == "memory was not freed, going on"
    assert (warning["before_mib"], warning["after_mib"]) == (6 * 1024, 6 * 1024)


async def test_memory_that_never_rests_is_held_for_the_time_out_only(
    local: LocalEngine,
    nvml: FakeNvml,
    begin: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holds(nvml, local.worker, 6 * GIB)
    settling = await begin(timeout=0.6)
    sizes = itertools.cycle((1 * GIB, 2 * GIB))

    def restless(card: Card) -> list[Process]:
        return [Process(local.worker, next(sizes))] if card is nvml.cards[0] else []

    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", restless)

    async with asyncio.timeout(10):
        await settling.wait(told=True)


async def test_what_an_engine_keeps_is_waited_for_until_it_rests(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object]
) -> None:
    holds(nvml, local.worker, 6 * GIB)
    settling = await begin()
    waiting = asyncio.ensure_future(settling.wait(told=True))

    holds(nvml, local.worker, 1 * GIB)

    assert await waiting


async def test_an_engine_that_holds_but_its_context_is_not_waited_for(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object]
) -> None:
    holds(nvml, local.worker, 450 * MIB)
    settling = await begin(kept=512 * MIB)

    async with asyncio.timeout(2):
        assert await settling.wait(told=True)
    assert observed(begin.metrics) == 0


@pytest.mark.parametrize("hidden", ["no sizes", "foreign pids", "no pids"])
async def test_memory_that_is_not_told_by_process_is_looked_for_on_the_card(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object], hidden: str
) -> None:
    for card in nvml.cards:
        card.free = 0
    if hidden == "no sizes":
        holds(nvml, local.worker, None)
    elif hidden == "foreign pids":
        nvml.cards[0].computing = [Process(2**22 + 5, 6 * GIB)]
    settling = await begin()
    waiting = asyncio.ensure_future(settling.wait(told=True))
    await still_waits(waiting, nvml)

    nvml.cards[0].free = 6 * GIB

    assert await waiting
    assert observed(begin.metrics) == 1


async def test_a_card_that_nobody_was_told_to_free_is_not_waited_for(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object]
) -> None:
    holds(nvml, local.worker, None)
    settling = await begin()

    async with asyncio.timeout(1):
        assert await settling.wait(told=False)


async def test_a_card_that_does_not_fall_is_left_early(
    local: LocalEngine,
    nvml: FakeNvml,
    begin: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settle, "_PATIENCE_SECONDS", 0.2)
    holds(nvml, local.worker, None)
    settling = await begin()

    async with asyncio.timeout(10):
        assert await settling.wait(told=True)


@pytest.mark.parametrize("case", ["off", "no driver", "remote", "lost"])
async def test_what_cannot_be_measured_is_not_waited_for(
    local: LocalEngine,
    nvml: FakeNvml,
    begin: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    holds(nvml, local.worker, 6 * GIB)
    options: dict[str, object] = {}
    if case == "off":
        options["timeout"] = 0.0
    elif case == "no driver":
        nvml.failing.add("nvmlInit")
    elif case == "remote":
        options["url"] = f"http://192.0.2.1:{local.port}"
    settling = await begin(**options)
    if case == "lost":
        nvml.failing |= {"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"}

    async with asyncio.timeout(2):
        assert await settling.wait(told=True)
    assert observed(begin.metrics) == 0


async def test_a_wait_that_is_cancelled_lets_the_driver_go(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object]
) -> None:
    holds(nvml, local.worker, 6 * GIB)
    settling = await begin()
    waiting = asyncio.ensure_future(settling.wait(told=True))
    await still_waits(waiting, nvml)

    waiting.cancel()
    settling.close()

    await asyncio.to_thread(wait_until, lambda: nvml.started == 0)


def test_a_fall_is_over_under_its_floor() -> None:
    fall = Fall(1000 * MIB, floor=50 * MIB, enough=500 * MIB, patience=5)

    assert not fall.is_over(0.0, 51 * MIB)
    assert fall.is_over(0.0, 50 * MIB)


def test_a_fall_in_steps_is_over_when_it_rests() -> None:
    fall = Fall(1000 * MIB, floor=0, enough=500 * MIB, patience=5)

    steps = [(0.0, 900), (0.5, 900), (1.0, 400), (1.2, 300), (1.4, 300), (1.6, 300)]
    assert [fall.is_over(at, used * MIB) for at, used in steps] == [False] * 5 + [True]


def test_a_fall_that_does_not_begin_is_over_when_patience_ends() -> None:
    fall = Fall(1000 * MIB, floor=0, enough=500 * MIB, patience=2)

    assert not fall.is_over(1.9, 990 * MIB)
    assert fall.is_over(2.0, 990 * MIB)
    assert not fall.has_fallen(990 * MIB)
