"""What `/healthz` knows of the engines, and what it costs them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from ocgpu.server import probes as module
from ocgpu.server.engines.comfyui import ComfyUI
from ocgpu.server.engines.ollama import Ollama
from ocgpu.server.probes import Probes
from ocgpu.server.relay.client import HttpUpstream
from ocgpu.server.relay.control import Control
from tests.fakes import Engines
from tests.fakes.faults import answer
from tests.server.client import OpenCall
from tests.server.served import Served
from tests.waiting import wait_until


@pytest.fixture
async def probes(engines: Engines) -> AsyncIterator[Probes]:
    """Probes that have run once."""
    upstreams = [HttpUpstream(fake.url, 1.0) for fake in (engines.ollama, engines.comfy)]
    found = [kind(Control(up)) for kind, up in zip((Ollama, ComfyUI), upstreams, strict=True)]
    known = Probes(list(zip(found, upstreams, strict=True)))
    known.refresh()
    await until(lambda: all(d["reachable"] for d in known.documents().values()))
    yield known
    await known.close()
    for upstream in upstreams:
        await upstream.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - probes run in the background
            await asyncio.sleep(0.005)


def age(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let time pass for the probes."""
    monkeypatch.setattr(module.time, "monotonic", _later(time.monotonic, seconds))


def _later(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    return lambda: clock() + seconds


def count(engines: Engines) -> int:
    return len(engines.record.calls("GET /system_stats"))


async def test_readers_in_quick_succession_ask_the_engines_nothing(
    engines: Engines, probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = probes._task
    await until(lambda: last.done())
    for _ in range(100):
        probes.documents()
    assert probes._task is last

    age(monkeypatch, 20.0)
    probes.documents()

    await until(lambda: count(engines) == 2)


async def test_an_engine_that_is_down_is_looked_for_more_often(
    engines: Engines, probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(engines.kill, engines.comfy)
    age(monkeypatch, 20.0)
    probes.documents()
    await until(lambda: probes.documents()["comfyui"]["reachable"] is False)
    assert "127.0.0.1" in probes.documents()["comfyui"]["error"]

    await asyncio.to_thread(engines.restart, engines.comfy)
    age(monkeypatch, 3.0)

    await until(lambda: probes.documents()["comfyui"]["reachable"] is True)
    assert "error" not in probes.documents()["comfyui"]


async def test_a_request_without_an_answer_is_a_reason_to_ask(
    engines: Engines, probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(engines.kill, engines.comfy)
    last = probes._task
    probes.doubt("comfyui")
    assert probes._task is last
    age(monkeypatch, 1.5)
    probes.doubt("another")
    assert probes._task is last

    probes.doubt("comfyui")

    await until(lambda: probes._probes[1].reachable is False)


@pytest.mark.parametrize("fault", [answer(500), answer(200, b"<html>"), answer(200, b"[]")])
async def test_an_engine_that_answers_something_else_is_not_reachable(
    engines: Engines, probes: Probes, monkeypatch: pytest.MonkeyPatch, fault: object
) -> None:
    engines.comfy.fail("GET /system_stats", fault)
    age(monkeypatch, 20.0)

    await until(lambda: probes.documents()["comfyui"]["reachable"] is False)


@pytest.mark.parametrize("body", [b"{}", b'{"system":7}', b'{"system":{"comfyui_version":7}}'])
async def test_a_comfyui_without_a_version_is_reachable(engines: Engines, body: bytes) -> None:
    upstream = HttpUpstream(engines.comfy.url, 1.0)
    engines.comfy.fail("GET /system_stats", answer(200, body))

    assert await ComfyUI(Control(upstream)).probe() == "unknown"
    await upstream.close()


def test_health_tells_what_the_last_probe_found(engines: Engines, served: Served) -> None:
    upstreams = served.health()["upstreams"]

    assert upstreams["ollama"]["version"] == "0.32.5"
    assert upstreams["comfyui"]["url"] == engines.comfy.url
    wait_until(lambda: served.health()["upstreams"]["comfyui"]["reachable"], what="a probe")


def test_props_whose_client_leaves_are_ended_upstream(engines: Engines, served: Served) -> None:
    engines.ollama.fail("GET /props", _hang)

    with OpenCall("GET", f"{served.ollama}/props"):
        wait_until(lambda: engines.record.calls("GET /props"), what="the request")

    wait_until(lambda: engines.record.calls("GET /props")[0].aborted, what="its end")


async def _hang(_request: object, _handler: object) -> None:
    await asyncio.Event().wait()
