"""llama-server behind the Ollama listener: told apart, never unloaded, waited for when it works."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest

from ocgpu.server.engines import llama_server
from ocgpu.server.engines.ollama import Ollama
from ocgpu.server.relay.client import HttpUpstream
from ocgpu.server.relay.control import Control
from ocgpu.server.relay.upstream import UpstreamError
from tests.fakes import Engines, Gate
from tests.fakes.faults import answer, stall
from tests.fakes.llama import FakeLlama

BUILD = "llama.cpp b11434-0d3b2a1"


@pytest.fixture
async def llama() -> AsyncIterator[FakeLlama]:
    fake = FakeLlama()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def ollama(llama: FakeLlama) -> AsyncIterator[Ollama]:
    upstream = HttpUpstream(llama.url, 1.0)
    yield Ollama(Control(upstream))
    await upstream.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0.005)


async def ended(quiet: "asyncio.Future[None]") -> None:
    async with asyncio.timeout(5):
        await quiet


@pytest.mark.parametrize("nameless", [False, True])
async def test_it_is_known_by_its_name_or_by_its_properties(
    llama: FakeLlama, ollama: Ollama, nameless: bool
) -> None:
    llama.nameless = nameless

    assert await ollama.probe() == BUILD


async def test_it_is_there_while_it_loads_its_model(llama: FakeLlama, ollama: Ollama) -> None:
    llama.loading = True

    assert await ollama.probe() == "llama.cpp"


async def test_another_server_is_neither(llama: FakeLlama, ollama: Ollama) -> None:
    llama.nameless = True
    llama.fail("GET /props", answer(404))

    with pytest.raises(UpstreamError, match="no version"):
        await ollama.probe()


async def test_work_for_a_client_that_left_is_waited_for(llama: FakeLlama, ollama: Ollama) -> None:
    llama.busy(working=True)
    quiet = asyncio.ensure_future(ollama.quiet())
    await until(lambda: len(llama.record.calls("GET /slots")) > 3)
    assert not quiet.done()

    llama.busy(working=False)

    await ended(quiet)


async def test_the_slots_of_old_versions_are_read(llama: FakeLlama, ollama: Ollama) -> None:
    llama.slots = [{"id": 0, "state": 0, "prompt": "x"}, {"id": 1, "state": 1}]
    quiet = asyncio.ensure_future(ollama.quiet())
    await until(lambda: len(llama.record.calls("GET /slots")) > 2)
    assert not quiet.done()

    llama.slots = [{"id": 0, "state": 0}]

    await ended(quiet)


async def test_without_slots_its_metrics_tell(llama: FakeLlama, ollama: Ollama) -> None:
    llama.slots, llama.metrics = None, 1
    quiet = asyncio.ensure_future(ollama.quiet())
    await until(lambda: len(llama.record.calls("GET /metrics")) > 2)
    assert not quiet.done()

    llama.metrics = 0

    await ended(quiet)


@pytest.mark.parametrize("slots", [answer(501), answer(404), answer(200, b"{}"), answer(401)])
async def test_one_that_does_not_tell_is_not_waited_for(
    llama: FakeLlama, ollama: Ollama, caplog: pytest.LogCaptureFixture, slots: object
) -> None:
    llama.fail("GET /slots", slots)

    for _ in range(2):
        await ended(asyncio.ensure_future(ollama.quiet()))

    assert sum("does not say whether it computes" in line for line in caplog.messages) == 1


async def test_one_that_answers_late_is_waited_for(
    llama: FakeLlama, ollama: Ollama, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ollama.probe()
    monkeypatch.setattr(llama_server, "_CALL_SECONDS", 0.05)
    llama.busy(working=True)
    llama.fail("GET /slots", stall(Gate()), times=2)
    quiet = asyncio.ensure_future(ollama.quiet())
    await until(lambda: len(llama.record.calls("GET /slots")) > 3)
    assert not quiet.done()

    llama.busy(working=False)

    await ended(quiet)


async def test_one_that_ended_computes_nothing(llama: FakeLlama, ollama: Ollama) -> None:
    llama.busy(working=True)
    quiet = asyncio.ensure_future(ollama.quiet())
    await until(lambda: len(llama.record.calls("GET /slots")) > 1)

    await llama.stop()

    await ended(quiet)


async def test_one_that_never_ends_is_given_up(
    llama: FakeLlama,
    ollama: Ollama,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(llama_server, "_QUIET_SECONDS", 0.2)
    llama.busy(working=True)

    await ended(asyncio.ensure_future(ollama.quiet()))

    assert any("computes on after" in line for line in caplog.messages)


async def test_a_real_ollama_is_quiet_at_once(engines: Engines) -> None:
    upstream = HttpUpstream(engines.ollama.url, 1.0)

    await Ollama(Control(upstream)).quiet()

    assert engines.record.names() == ["GET /api/version"]
    await upstream.close()


async def test_it_has_nothing_to_unload_and_that_is_said_once(
    llama: FakeLlama, ollama: Ollama, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        first, second = await ollama.unload(5.0), await ollama.unload(5.0)

    assert (first.models, first.timed_out, second.models) == ([], False, [])
    assert set(llama.record.names()) == {"GET /api/ps"}
    assert sum("nothing there is unloaded" in line for line in caplog.messages) == 1
