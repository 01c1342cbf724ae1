"""The end of serving, seen by clients: who comes late, who waits, who is served, who is cut."""

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidStatus

from ocgpu.server.drain import refuse
from ocgpu.server.serve import Bound
from tests.server.inloop import Connection, RawUpstream, connect, exchange, proxy, read_head
from tests.server.requests import CHAT, Engine, get, json_of, post, status_of, waiting

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n"
HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class Draining:
    """A proxy in its drain, held there by a chat.

    Attributes:
        bound: Its addresses.
        engine: Lets the chat end.
        seen: Requests that came to the upstream.
    """

    def __init__(self, bound: Bound, engine: Engine, seen: list[bytes]) -> None:
        self.bound = bound
        self.engine = engine
        self.seen = seen


@contextlib.asynccontextmanager
async def draining() -> AsyncIterator[Draining]:
    """A proxy that has begun to drain; its chat must end well."""
    engine, seen, stop = Engine(), [], asyncio.Event()

    async def upstream(connection: Connection) -> None:
        seen.append(b"")
        await engine(connection)

    async with RawUpstream(upstream) as raw:
        async with proxy(raw.url, raw.url, stop, drain_timeout=8.0) as bound:
            chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT))
            await waiting(bound.ollama_url, llm_inflight=1)
            # Until then the probes of the start may still be on their way.
            await waiting(bound.admin_url, draining=False)
            stop.set()
            await waiting(bound.ollama_url, draining=True)
            seen.clear()
            yield Draining(bound, engine, seen)
            engine.go_on.set()
        assert (await chat).endswith(b"chat")


def assert_shutdown(answer: bytes) -> None:
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert status_of(answer) == 503
    assert json_of(answer)["reason"] == "shutdown"
    assert b"\r\nretry-after: " in head
    assert b"\r\nconnection: close" in head


@pytest.mark.parametrize(
    "request_",
    [
        get("/api/tags").replace(b"Connection: close\r\n", b""),
        get("/props").replace(b"Connection: close\r\n", b""),
        CHAT.replace(b"Connection: close\r\n", b""),
        post("/api/pull", "Content-Length: 5").replace(b"Content-Length: 0\r\n", b"") + b"12345",
        b"POST /api/chat HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
        b"POST /api/chat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
        get("/healthz", method="POST"),
    ],
    ids=["passing", "props", "locked", "body", "expecting", "half a body", "not ours"],
)
async def test_a_request_in_the_drain_is_a_503_and_ends_its_connection(request_: bytes) -> None:
    async with draining() as proxied:
        for url in (proxied.bound.ollama_url, proxied.bound.comfy_url):
            assert_shutdown(await exchange(url, request_))

        assert proxied.seen == [], "nothing may reach the upstream"


async def test_our_own_paths_still_answer_in_the_drain() -> None:
    async with draining() as proxied:
        for url in (proxied.bound.ollama_url, proxied.bound.comfy_url, proxied.bound.admin_url):
            answer = await exchange(url, get("/healthz").replace(b"Connection: close\r\n", b""))
            assert status_of(answer) == 503
            assert json_of(answer)["draining"] is True
        metrics = await exchange(proxied.bound.ollama_url, get("/metrics"))
        assert status_of(metrics) == 200
        assert status_of(await exchange(proxied.bound.admin_url, get("/events"))) == 200


async def test_no_command_is_taken_in_the_drain() -> None:
    async with draining() as proxied:
        answer = await exchange(proxied.bound.admin_url, post("/gpulock/release"))

        assert_shutdown(answer)


async def test_a_kept_connection_is_closed_with_its_next_answer() -> None:
    stop, engine = asyncio.Event(), Engine()
    async with RawUpstream(engine) as raw:
        async with proxy(raw.url, raw.url, stop, drain_timeout=8.0) as bound:
            kept = await connect(bound.ollama_url)
            await kept.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await kept.head()
            assert not any(line.lower() == b"connection: close" for line in head)
            length = next(line for line in head if line.lower().startswith(b"content-length"))
            await kept.read(int(length.partition(b":")[2]))
            chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT))
            await waiting(bound.ollama_url, llm_inflight=1)
            stop.set()
            await waiting(bound.ollama_url, draining=True)

            await kept.write(b"GET /api/tags HTTP/1.1\r\nHost: x\r\n\r\n")

            assert_shutdown(await kept.rest())
            await kept.close()
            engine.go_on.set()
        await chat


async def test_a_websocket_in_the_drain_is_refused() -> None:
    async with draining() as proxied:
        with pytest.raises(InvalidStatus) as refused:
            await open_websocket(proxied.bound.comfy_url.replace("http", "ws") + "/ws")

        assert refused.value.response.status_code == 503
        assert refused.value.response.headers["Retry-After"]
        assert proxied.seen == []


async def test_a_websocket_that_is_not_open_yet_is_refused() -> None:
    asked, stop = asyncio.Event(), asyncio.Event()

    async def silent(connection: Connection) -> None:
        head = await connection.head()
        if b" /ws " in head[0]:
            asked.set()
        await connection.rest()

    async with RawUpstream(silent) as raw, proxy(raw.url, raw.url, stop) as bound:
        client = await connect(bound.comfy_url)
        await client.write(HANDSHAKE)
        await asked.wait()

        stop.set()

        assert status_of(await client.rest()) == 503
        await client.close()


async def test_an_open_websocket_is_told_1001_before_streams_end() -> None:
    async def upstream(connection: Connection) -> None:
        head = await connection.head()
        if b" /ws " not in head[0]:
            await engine_of(connection, head)
            return
        key = next(line for line in head if line.lower().startswith(b"sec-websocket-key"))
        await connection.write(accepted(key.partition(b":")[2].strip()))
        await connection.rest()

    go_on, stop = asyncio.Event(), asyncio.Event()

    async def engine_of(connection: Connection, head: list[bytes]) -> None:
        if b"/api/chat" in head[0]:
            await connection.read(2)
            await connection.write(STREAM)
            await go_on.wait()
            await connection.write(b"0\r\n\r\n")

    async with RawUpstream(upstream) as raw:
        async with proxy(raw.url, raw.url, stop, drain_timeout=8.0) as bound:
            chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT))
            await waiting(bound.ollama_url, llm_inflight=1)
            async with open_websocket(bound.comfy_url.replace("http", "ws") + "/ws") as websocket:
                stop.set()
                with pytest.raises(ConnectionClosed) as closed:
                    async with asyncio.timeout(5):
                        await websocket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001
            assert not chat.done()
            go_on.set()
        assert (await chat).endswith(b"5\r\nfirst\r\n0\r\n\r\n")


def accepted(key: bytes) -> bytes:
    digest = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()  # noqa: S324
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + base64.b64encode(digest) + b"\r\n\r\n"
    )


@pytest.mark.parametrize("path", [b"/api/chat", b"/api/pull"], ids=["locked", "passing"])
@pytest.mark.parametrize(
    "head", [STREAM, b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nfirst"], ids=["chunked", "cl"]
)
async def test_a_stream_that_is_cut_has_no_clean_end(head: bytes, path: bytes) -> None:
    async def upstream(connection: Connection) -> None:
        first = await connection.head()
        if path in first[0]:
            await connection.read(2)
            await connection.write(head)
            await connection.rest()

    stop = asyncio.Event()
    async with RawUpstream(upstream) as raw, proxy(raw.url, "", stop, drain_timeout=0.2) as bound:
        client = await connect(bound.ollama_url)
        await client.write(CHAT.replace(b"/api/chat", path))
        await read_head(client.reader)
        async with asyncio.timeout(5):
            begun = await client.reader.readuntil(b"first")
        stop.set()
        rest = await client.rest()
        await client.close()

    assert begun.endswith(b"first")
    # The chunked framing's end is `0` and two line ends; a length is not reached.
    assert b"0\r\n\r\n" not in rest
    assert len(rest) < 10


async def test_a_body_that_is_still_coming_is_read_and_then_refused() -> None:
    stop, engine = asyncio.Event(), Engine()
    async with RawUpstream(engine) as raw:
        async with proxy(raw.url, "", stop, drain_timeout=8.0) as bound:
            client = await connect(bound.ollama_url)
            await client.write(CHAT.replace(b"Content-Length: 2\r\n\r\n{}", b"Content-Length: 9"))
            await client.write(b"\r\n\r\n{}")
            await waiting(bound.ollama_url, waiting={"llm": 0, "image": 0, "bytes": 2})
            stop.set()
            await waiting(bound.ollama_url, draining=True)

            await client.write(b"       ")

            assert_shutdown(await client.rest())
            await client.close()
        assert engine.chats == 0


@pytest.mark.parametrize(
    ("headers", "pieces", "taken"),
    [
        ([], [b"a", b"b", b""], 3),
        ([], [b"a" * 60_000] * 4, 2),
        ([(b"expect", b"100-continue")], [b"a"], 0),
    ],
    ids=["to its end", "as far as sensible", "not asked for"],
)
async def test_who_is_refused_has_his_body_read(
    headers: list[tuple[bytes, bytes]], pieces: list[bytes], taken: int
) -> None:
    # A connection that is closed while bytes are unread is reset, and the answer may be lost.
    order: list[str] = []

    async def receive() -> dict[str, object]:
        piece = pieces[order.count("receive")]
        order.append("receive")
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    async def send(message: MutableMapping[str, Any]) -> None:
        order.append(message["type"])

    await refuse({"type": "http", "headers": headers}, receive, send)

    assert order == ["receive"] * taken + ["http.response.start", "http.response.body"]


async def test_a_drain_timeout_of_0_cuts_at_once() -> None:
    engine, stop = Engine(), asyncio.Event()
    loop = asyncio.get_running_loop()
    async with RawUpstream(engine) as raw:
        async with proxy(raw.url, "", stop, drain_timeout=0.0) as bound:
            chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT))
            await waiting(bound.ollama_url, llm_inflight=1)
            began = loop.time()
        assert status_of(await chat) == 503
    assert loop.time() - began < 5


async def test_who_connects_while_it_ends_gets_an_answer_or_a_refusal() -> None:
    outcomes: set[str] = set()

    async def knock(url: str) -> str:
        try:
            answer = await exchange(url, get("/api/tags"))
        except ConnectionError:
            return "refused"
        return str(status_of(answer)) if answer else "closed"

    async def keep_knocking(url: str) -> None:
        while "refused" not in outcomes:
            outcomes.add(await knock(url))

    engine, stop = Engine(), asyncio.Event()
    async with RawUpstream(engine) as raw:
        async with proxy(raw.url, "", stop, drain_timeout=5.0) as bound:
            chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT))
            await waiting(bound.ollama_url, llm_inflight=1)
            knocking = [asyncio.ensure_future(keep_knocking(bound.ollama_url)) for _ in range(4)]
            stop.set()
            await waiting(bound.ollama_url, draining=True)
            engine.go_on.set()
        async with asyncio.timeout(10):
            await asyncio.gather(chat, *knocking)

    assert outcomes <= {"404", "503", "closed", "refused"}
    assert {"503", "refused"} <= outcomes


async def test_a_stream_that_ends_in_time_ends_well_and_ends_the_drain() -> None:
    loop = asyncio.get_running_loop()
    async with draining() as proxied:
        proxied.engine.go_on.set()
        began = loop.time()
    assert loop.time() - began < 7, "not the whole of DRAIN_TIMEOUT"
