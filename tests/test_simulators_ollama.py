"""The simulated Ollama satisfies the real clients and keeps the real one's habits."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable

import ollama
import openai
import pytest
from aiohttp import ClientSession

from ocgpu.simulators import OllamaSimulator
from ocgpu.simulators.ollama_models import parse_keep_alive

CHAT = {"model": "llama3.2", "messages": [{"role": "user", "content": "hello"}]}
LOAD = {"model": "llama3.2", "prompt": ""}
UNLOAD = {**LOAD, "keep_alive": 0}
TEXT = "the card is free"


@pytest.fixture
async def engine() -> AsyncIterator[OllamaSimulator]:
    simulator = OllamaSimulator(
        load_time=0.0, unload_time=0.0, memory_lag=0.0, token_time=0.0, tokens=4
    )
    await simulator.start()
    yield simulator
    await simulator.stop()


@pytest.fixture
async def client(engine: OllamaSimulator) -> AsyncIterator[ClientSession]:
    async with ClientSession(engine.url) as session:
        yield session


@pytest.fixture
async def official(engine: OllamaSimulator) -> AsyncIterator[ollama.AsyncClient]:
    client = ollama.AsyncClient(host=engine.url)
    yield client
    await client.close()


@pytest.fixture
async def open_ai(engine: OllamaSimulator) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none") as client:
        yield client


async def reached(engine: OllamaSimulator, condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds after a change of the engine's use of the card."""
    changed = asyncio.Event()
    engine.usage.watch = lambda _usage: changed.set()
    async with asyncio.timeout(10):
        while not condition():
            changed.clear()
            await changed.wait()


async def names_loaded(client: ClientSession) -> list[str]:
    async with client.get("/api/ps") as answer:
        return [model["name"] for model in (await answer.json())["models"]]


async def test_the_ollama_client_streams_a_chat(official: ollama.AsyncClient) -> None:
    parts = [part async for part in await official.chat(**CHAT, stream=True)]

    assert "".join(part.message.content for part in parts) == TEXT
    assert [part.done for part in parts] == [False] * 4 + [True]
    assert parts[-1].done_reason == "stop"
    assert parts[-1].eval_count == 4


async def test_the_ollama_client_generates(official: ollama.AsyncClient) -> None:
    answer = await official.generate("llama3.2", "hello")

    assert answer.response == TEXT
    assert answer.done_reason == "stop"


async def test_the_ollama_client_reads_the_shelf(official: ollama.AsyncClient) -> None:
    await official.generate("llama3.2", "hello", options={"num_predict": 1})

    assert "llama3.2:latest" in [model.model for model in (await official.list()).models]
    assert (await official.ps()).models[0].size_vram == 2 * 1024**3
    assert (await official.show("llama3.2")).details.format == "gguf"
    assert [part.status async for part in await official.pull("llama3.2", stream=True)][-1] == (
        "success"
    )


async def test_the_ollama_client_embeds(official: ollama.AsyncClient) -> None:
    answer = await official.embed("nomic-embed-text", ["one", "two"])

    assert len(answer.embeddings) == 2
    assert (await official.embeddings("nomic-embed-text", "one")).embedding == answer.embeddings[0]


async def test_the_openai_client_streams_a_chat(open_ai: openai.AsyncOpenAI) -> None:
    stream = await open_ai.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    )

    chunks = [chunk async for chunk in stream]

    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(texts) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 4


async def test_the_openai_client_completes_embeds_and_lists(open_ai: openai.AsyncOpenAI) -> None:
    chat = await open_ai.chat.completions.create(**CHAT)
    text = await open_ai.completions.create(model="llama3.2", prompt="hello", max_tokens=2)
    vector = await open_ai.embeddings.create(model="nomic-embed-text", input="one")

    assert chat.choices[0].message.content == TEXT
    assert text.choices[0].text == "the card"
    assert len(vector.data[0].embedding) == 8
    assert "qwen3:8b" in [model.id for model in (await open_ai.models.list()).data]
    assert (await open_ai.models.retrieve("qwen3:8b")).owned_by == "library"


async def test_an_unknown_model_is_a_404_in_both_forms(
    official: ollama.AsyncClient, open_ai: openai.AsyncOpenAI
) -> None:
    with pytest.raises(ollama.ResponseError) as native:
        await official.generate("nope", "hello")
    with pytest.raises(openai.NotFoundError) as compatible:
        await open_ai.chat.completions.create(**{**CHAT, "model": "nope"})

    assert (native.value.status_code, native.value.error) == (404, "model 'nope' not found")
    assert compatible.value.body["message"] == "model 'nope' not found"


async def test_a_stream_is_not_buffered(engine: OllamaSimulator, client: ClientSession) -> None:
    last = asyncio.Event()

    async def hold_the_last(_request: object, index: int) -> None:
        if index == 3:
            await last.wait()

    engine.before_token = hold_the_last

    async with client.post("/api/chat", json=CHAT) as answer:
        first = json.loads(await answer.content.readline())
        assert first["message"]["content"] == "the"
        last.set()
        rest = await answer.content.read()

    assert answer.headers["Content-Type"] == "application/x-ndjson"
    assert rest.count(b"\n") == 4


async def test_a_model_is_not_listed_while_it_loads(client: ClientSession) -> None:
    slow = OllamaSimulator(load_time=30.0)
    await slow.start()
    async with ClientSession(slow.url) as session:
        load = asyncio.create_task(session.post("/api/generate", json=LOAD))
        await reached(slow, lambda: slow.usage.resident_bytes > 0)

        assert await names_loaded(session) == []

        load.cancel()
        await reached(slow, lambda: slow.usage.resident_bytes == 0)
    await slow.stop()


async def test_an_empty_prompt_loads_only(engine: OllamaSimulator, client: ClientSession) -> None:
    async with client.post("/api/generate", json=LOAD) as answer:
        body = await answer.json()

    assert (body["response"], body["done_reason"]) == ("", "load")
    assert await names_loaded(client) == ["llama3.2:latest"]
    assert engine.usage.computing == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", UNLOAD),
        ("/api/chat", {"model": "llama3.2", "messages": [], "keep_alive": "0s"}),
    ],
)
async def test_an_unload_is_answered_before_it_happens(
    engine: OllamaSimulator, client: ClientSession, path: str, body: dict[str, object]
) -> None:
    async with client.post("/api/generate", json=LOAD):
        pass
    engine.scheduler.unload_seconds = 30.0

    async with client.post(path, json=body) as answer:
        assert (await answer.json())["done_reason"] == "unload"

    assert await names_loaded(client) == ["llama3.2:latest"]


async def test_the_list_is_empty_before_the_memory_is_back(
    engine: OllamaSimulator, client: ClientSession
) -> None:
    engine.scheduler.memory_lag_seconds = 30.0
    async with client.post("/api/generate", json=LOAD):
        pass
    async with client.post("/api/generate", json=UNLOAD):
        pass

    async with asyncio.timeout(10):
        while await names_loaded(client):
            pass

    assert engine.usage.resident_bytes > 0


async def test_an_embedding_model_is_unloaded_through_generate(client: ClientSession) -> None:
    model = {"model": "nomic-embed-text"}
    async with client.post("/api/embed", json={**model, "input": "one"}):
        pass

    async with client.post("/api/generate", json={**model, "keep_alive": 0}) as answer:
        assert answer.status == 200
    async with client.post("/api/generate", json={**model, "prompt": "hello"}) as answer:
        assert answer.status == 400

    async with asyncio.timeout(10):
        while await names_loaded(client):
            pass


async def test_an_unload_of_what_is_not_loaded_does_nothing(
    engine: OllamaSimulator, client: ClientSession
) -> None:
    async with client.post("/api/generate", json=UNLOAD) as answer:
        assert answer.status == 200

    assert engine.usage.resident_bytes == 0


async def test_an_unload_waits_for_the_requests_in_flight(
    engine: OllamaSimulator, client: ClientSession
) -> None:
    last = asyncio.Event()
    engine.before_token = lambda _request, _index: last.wait()
    chat = asyncio.create_task(client.post("/api/chat", json={**CHAT, "stream": False}))
    await reached(engine, lambda: engine.usage.computing == 1)

    async with client.post("/api/generate", json=UNLOAD):
        pass
    assert await names_loaded(client) == ["llama3.2:latest"]
    last.set()

    assert (await chat).status == 200
    await reached(engine, lambda: engine.usage.resident_bytes == 0)


async def test_a_model_leaves_after_its_keep_alive(
    engine: OllamaSimulator, client: ClientSession
) -> None:
    async with client.post("/api/chat", json={**CHAT, "keep_alive": "10ms"}) as answer:
        await answer.read()

    await reached(engine, lambda: engine.usage.resident_bytes == 0)

    assert await names_loaded(client) == []


async def test_a_client_that_leaves_stops_the_generation(
    engine: OllamaSimulator, client: ClientSession
) -> None:
    never = asyncio.Event()
    engine.before_token = lambda _request, index: never.wait() if index else asyncio.sleep(0)

    async with client.post("/api/chat", json=CHAT) as answer:
        await answer.content.readline()
        assert engine.usage.computing == 1
        answer.close()

    await reached(engine, lambda: engine.usage.computing == 0)


async def test_a_cloud_model_uses_no_card(engine: OllamaSimulator, client: ClientSession) -> None:
    seen: list[int] = []
    engine.usage.watch = lambda usage: seen.append(usage.resident_bytes + usage.computing)

    async with client.post("/api/chat", json={**CHAT, "model": "gpt-oss:120b-cloud"}) as answer:
        assert answer.status == 200
        await answer.read()

    assert seen == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "ollama.example.org"}, 403),
        ({"Host": "localhost:11434"}, 200),
        ({"Host": "host.docker.internal"}, 200),
        ({"Host": "192.168.1.7:11434"}, 200),
        ({"Host": "8.8.8.8"}, 403),
        ({"Origin": "https://chat.example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "app://obsidian.md"}, 200),
        ({"Host": "my.internal", "Origin": "https://my.internal"}, 200),
    ],
    ids=str,
)
async def test_host_and_origin_are_checked(
    client: ClientSession, headers: dict[str, str], status: int
) -> None:
    async with client.get("/api/version", headers=headers) as answer:
        assert answer.status == status


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_it_says_that_it_runs(client: ClientSession, method: str) -> None:
    async with client.request(method, "/") as answer:
        assert answer.status == 200
        assert await answer.text() == ("Ollama is running" if method == "GET" else "")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0, 0.0), ("0", 0.0), ("0s", 0.0), (-1, math.inf), ("-1m", math.inf), ("1m30s", 90.0),
     ("500ms", 0.5), (300, 300.0), (None, None)],
)  # fmt: skip
def test_keep_alive_is_read_as_ollama_does(value: object, seconds: float | None) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize(
    "body", [b"", b"{not json", b"[1]", b'{"model":"llama3.2","keep_alive":"x"}']
)
async def test_a_bad_body_is_a_400(client: ClientSession, body: bytes) -> None:
    async with client.post("/api/generate", data=body) as answer:
        assert answer.status == 400
        assert "error" in await answer.json()
