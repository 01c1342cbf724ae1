"""How models leave the card: against an Ollama that can misbehave, over real sockets."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from ocgpu.server.engines import ollama_unload
from ocgpu.server.engines.ollama import Ollama
from ocgpu.server.relay.client import HttpUpstream
from ocgpu.server.relay.control import Control
from tests.fakes import Engines, Gate
from tests.fakes.faults import answer, old_embeddings
from tests.server.client import OpenCall, call

LLAMA, QWEN, NOMIC = "llama3.2:latest", "qwen3:8b", "nomic-embed-text:latest"


@pytest.fixture
async def ollama(engines: Engines) -> AsyncIterator[Ollama]:
    upstream = HttpUpstream(engines.ollama.url, 1.0)
    yield Ollama(Control(upstream))
    await upstream.close()


def load(engines: Engines, *models: str) -> None:
    """Load models past every proxy."""
    for model in models:
        path = "/api/embed" if model == NOMIC else "/api/generate"
        assert call("POST", engines.ollama.url + path, {"model": model, "input": "x"}).status == 200


def listed(engines: Engines) -> list[str]:
    return [runner.model.name for runner in engines.ollama.scheduler.loaded()]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the fakes live in another thread
            await asyncio.sleep(0.005)


async def test_every_listed_model_leaves(engines: Engines, ollama: Ollama) -> None:
    load(engines, LLAMA, QWEN, NOMIC)
    engines.record.clear()

    done = await ollama.unload(5.0)

    assert (sorted(done.models), done.timed_out) == ([LLAMA, NOMIC, QWEN], False)
    assert listed(engines) == []
    # Embedding models too, without a request that could load one.
    assert engines.record.calls("POST /api/embed") == []


async def test_an_empty_ollama_is_asked_once_and_told_nothing(
    engines: Engines, ollama: Ollama
) -> None:
    done = await ollama.unload(5.0)

    assert done.models == []
    assert engines.record.names() == ["GET /api/ps"]
    assert len(engines.record.calls()) == 1


async def test_an_old_ollama_gets_the_embedding_that_unloads(
    engines: Engines, ollama: Ollama
) -> None:
    load(engines, NOMIC)
    engines.record.clear()
    engines.ollama.fail("unload", old_embeddings)

    done = await ollama.unload(5.0)

    assert not done.timed_out
    expected = ["GET /api/ps", f"unload {NOMIC}", "GET /api/ps", "POST /api/embed", "GET /api/ps"]
    assert engines.record.names() == expected


async def test_a_model_that_left_meanwhile_is_not_loaded_to_be_unloaded(
    engines: Engines, ollama: Ollama
) -> None:
    load(engines, NOMIC)
    engines.record.clear()

    async def refuse_and_leave(request: web.Request, handler: object) -> web.StreamResponse:
        engines.ollama.scheduler.expire(engines.ollama.models[NOMIC])
        while engines.ollama.scheduler.loaded():  # noqa: ASYNC110 - the fake's own loop
            await asyncio.sleep(0.001)
        return web.json_response({"error": "no"}, status=400)

    engines.ollama.fail("unload", refuse_and_leave)

    assert not (await ollama.unload(5.0)).timed_out
    assert engines.record.calls("POST /api/embed") == []


async def test_a_model_that_ollama_does_not_know_any_more_is_no_refusal(
    engines: Engines, ollama: Ollama, caplog: pytest.LogCaptureFixture
) -> None:
    load(engines, LLAMA)
    engines.record.clear()
    engines.ollama.fail("unload", answer(404))

    assert (await ollama.unload(0.2)).timed_out

    assert engines.record.calls("POST /api/embed") == []
    assert not any("refused" in line for line in caplog.messages)


async def test_one_that_is_too_busy_is_told_again(engines: Engines, ollama: Ollama) -> None:
    load(engines, LLAMA)
    engines.record.clear()
    engines.ollama.fail("unload", answer(503), times=2)

    done = await ollama.unload(5.0)

    assert (done.models, done.timed_out) == ([LLAMA], False)
    assert len(engines.record.calls(f"unload {LLAMA}")) == 3
    assert engines.record.calls("POST /api/embed") == []


async def test_one_that_refuses_everything_is_named_and_left(
    engines: Engines, ollama: Ollama, caplog: pytest.LogCaptureFixture
) -> None:
    load(engines, LLAMA)
    for name in ("unload", "POST /api/embed"):
        engines.ollama.fail(name, answer(400))

    assert (await ollama.unload(0.3)).timed_out

    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert [r.getMessage() for r in warnings] == [
        f"unload: refused for {LLAMA}: 400",
        "models still loaded after 0.3s, going on",
    ]
    assert warnings[-1].__dict__["models"] == [LLAMA]


async def test_a_model_in_use_past_the_proxy_is_told_again_and_then_left(
    engines: Engines, ollama: Ollama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ollama_unload, "_AGAIN_SECONDS", 0.1)
    token = engines.ollama.hold_token(0)
    chat = {"model": LLAMA, "messages": [{"role": "user"}], "keep_alive": "5m"}
    with OpenCall("POST", f"{engines.ollama.url}/api/chat", chat) as stranger:
        token.wait_reached()
        assert (await ollama.unload(0.5)).timed_out
        assert len(engines.record.calls(f"unload {LLAMA}")) > 1
        unloading = asyncio.ensure_future(ollama.unload(10.0))
        await until(lambda: len(engines.record.calls(f"unload {LLAMA}")) > 4)

        token.open()

        assert stranger.answer().status == 200
    assert not (await unloading).timed_out


async def test_models_that_come_or_come_back_during_the_unload_leave_too(
    engines: Engines, ollama: Ollama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ollama_unload, "_AGAIN_SECONDS", 1000.0)
    token = engines.ollama.hold_token(1)
    with OpenCall("POST", f"{engines.ollama.url}/api/generate", {"model": LLAMA, "prompt": "x"}):
        token.wait_reached()
        load(engines, QWEN)
        unloading = asyncio.ensure_future(ollama.unload(10.0))
        await until(lambda: listed(engines) == [LLAMA])
        looks = len(engines.record.calls("GET /api/ps"))
        await until(lambda: len(engines.record.calls("GET /api/ps")) > looks + 1)

        await asyncio.to_thread(load, engines, QWEN, NOMIC)

        await until(lambda: listed(engines) == [LLAMA])
        token.open()
        done = await unloading
    assert sorted(done.models) == [LLAMA, NOMIC, QWEN]
    assert len(engines.record.calls(f"unload {QWEN}")) == 2


async def test_a_list_that_blocks_for_a_while_is_asked_again_and_told_once(
    engines: Engines,
    ollama: Ollama,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ollama_unload, "_CALL_MAX_SECONDS", 0.1)
    load(engines, LLAMA)
    engines.record.clear()
    engines.ollama.ps_gate = Gate()
    unloading = asyncio.ensure_future(ollama.unload(10.0))
    await until(lambda: len(engines.record.calls("GET /api/ps")) > 2)
    assert not unloading.done()

    engines.ollama.ps_gate.open()

    done = await unloading
    assert (done.models, done.timed_out, listed(engines)) == ([LLAMA], False, [])
    assert sum(r.levelno == logging.WARNING for r in caplog.records) == 1


async def test_a_command_that_blocks_is_not_repeated_at_once(
    engines: Engines, ollama: Ollama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ollama_unload, "_CALL_MAX_SECONDS", 0.1)
    load(engines, LLAMA)
    gate = Gate()

    async def late(request: web.Request, handler: object) -> web.StreamResponse:
        engines.ollama.scheduler.expire(engines.ollama.models[LLAMA])
        await gate.passing()
        return web.json_response({})

    engines.ollama.fail("unload", late)

    done = await ollama.unload(10.0)

    assert (done.models, done.timed_out) == ([LLAMA], False)
    assert len(engines.record.calls(f"unload {LLAMA}")) == 1
    gate.open()


async def test_an_ollama_that_is_down_is_left_at_once(engines: Engines, ollama: Ollama) -> None:
    await asyncio.to_thread(engines.kill, engines.ollama)

    async with asyncio.timeout(5):
        assert not (await ollama.unload(60.0)).timed_out
