"""A websocket's handshake: what the upstream is told, and every way in which it may not want to."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial

import aiohttp
import pytest
from aiohttp import web

from ocgpu.server import serve as serve_module
from ocgpu.server.relay.websocket import WebsocketRelay
from tests.server.client import Answer
from tests.server.inloop import WATCHDOG, Connection, RawUpstream, proxy, read_head
from tests.server.websocket_peers import accept, asked, client, echo, raw_client, upstream

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

Handler = Callable[[Connection], Awaitable[None]]


def answering(*pieces: bytes) -> Handler:
    """An upstream that reads a request and says this."""

    async def handler(connection: Connection) -> None:
        await asked(connection)
        for piece in pieces:
            await connection.write(piece)
        await connection.rest()

    return handler


async def refusal_of(handler: Handler) -> Answer:
    """What a client gets through the proxy from an upstream that refuses."""
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with (
        RawUpstream(handler) as raw,
        proxy(comfy_url=raw.url) as bound,
        aiohttp.ClientSession() as session,
        session.get(f"{bound.comfy_url}/ws", headers=upgrade) as response,
    ):
        return Answer(response.status, list(response.headers.items()), await response.read())


async def test_a_refusal_passes_with_its_body_and_every_header() -> None:
    got = await refusal_of(
        answering(
            b"HTTP/1.1 403 Forbidden\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Why: origin\r\n",
            b"Content-Type: text/plain\r\nContent-Length: 9\r\n\r\nnot ",
            b"yours",
        )
    )

    assert got.status == 403
    assert got.body == b"not yours"
    assert [value for name, value in got.headers if name.lower() == "set-cookie"] == ["a=1", "b=2"]
    assert got.header("x-why") == "origin"
    assert got.header("content-type") == "text/plain"


@pytest.mark.parametrize(
    "framing",
    [
        b"Transfer-Encoding: chunked\r\n\r\n4\r\ngone\r\n0\r\n\r\n",
        b"Content-Length: 4\r\n\r\ngone",
    ],
)
async def test_a_refusals_body_passes_however_it_is_framed(framing: bytes) -> None:
    got = await refusal_of(answering(b"HTTP/1.1 404 Not Found\r\n" + framing))

    assert got.status == 404
    assert got.body == b"gone"


async def test_a_refusals_body_without_a_length_ends_with_the_connection() -> None:
    async def handler(connection: Connection) -> None:
        await asked(connection)
        await connection.write(b"HTTP/1.1 400 Bad Request\r\n\r\nold")

    got = await refusal_of(handler)

    assert got.status == 400
    assert got.body == b"old"


async def test_a_refusal_without_end_is_cut() -> None:
    async def handler(connection: Connection) -> None:
        await asked(connection)
        await connection.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        while True:
            await connection.write(b"x" * 65_536)

    got = await refusal_of(handler)

    assert got.status == 403
    assert len(got.body) == 2**20


@pytest.mark.parametrize("status", [b"200", b"301", b"426", b"502", b"599"])
async def test_any_legal_status_passes(status: bytes) -> None:
    got = await refusal_of(answering(b"HTTP/1.1 " + status + b" So\r\nContent-Length: 0\r\n\r\n"))

    assert got.status == int(status)


NO_HANDSHAKE = {
    "status 099": b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n",
    "status 999": b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    "illegal header": b"HTTP/1.1 403 No\r\nX-A: a\x01b\r\nContent-Length: 0\r\n\r\n",
    "header name too long": b"HTTP/1.1 403 No\r\n" + b"a" * 40_000 + b": b\r\n\r\n",
    "no http": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "nothing": b"",
    "half a head": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: web",
    "no upgrade": b"HTTP/1.1 101 Switching Protocols\r\nX: y\r\n\r\n",
    "no accept": b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "wrong accept": b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: c3VyZWx5IG5vdCB0aGlzIG9uZQ==\r\n\r\n",
    "garbage behind": b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: x\r\n\r\n\xff\xff\xff\xff",
}


@pytest.mark.parametrize("said", NO_HANDSHAKE.values(), ids=NO_HANDSHAKE.keys())
async def test_an_answer_that_makes_no_sense_is_a_502(said: bytes) -> None:
    async def handler(connection: Connection) -> None:
        await asked(connection)
        await connection.write(said)

    got = await refusal_of(handler)

    assert got.status == 502
    assert got.json()["reason"] == "upstream"


async def test_a_head_without_end_is_a_502() -> None:
    async def handler(connection: Connection) -> None:
        await asked(connection)
        await connection.write(b"HTTP/1.1 403 No\r\n")
        while True:
            await connection.write(b"X-A: bbbbbbbbbbbbbbbb\r\n" * 1000)

    assert (await asyncio.wait_for(refusal_of(handler), WATCHDOG)).status == 502


async def test_an_extension_that_nobody_offered_is_a_502() -> None:
    async def handler(connection: Connection) -> None:
        await accept(connection, b"Sec-WebSocket-Extensions: permessage-deflate")

    assert (await refusal_of(handler)).status == 502


async def test_no_upstream_is_a_502() -> None:
    async with RawUpstream(lambda _connection: asyncio.sleep(0)) as gone:
        url = gone.url
    async with proxy(comfy_url=url) as bound:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            async with client(bound.comfy_url):
                pass

    assert refusal.value.status == 502


async def test_an_upstream_that_is_silent_is_a_502_and_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = asyncio.Event()

    async def handler(connection: Connection) -> None:
        await asked(connection)
        assert await connection.rest() == b""
        left.set()

    monkeypatch.setattr(
        serve_module, "WebsocketRelay", partial(WebsocketRelay, handshake_timeout=0.2)
    )

    assert (await refusal_of(handler)).status == 502
    assert left.is_set()


async def test_a_drain_ends_a_handshake_with_a_503_and_leaves_the_upstream() -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def handler(connection: Connection) -> None:
        await asked(connection)
        begun.set()
        assert await connection.rest() == b""
        left.set()

    async with RawUpstream(handler) as raw:
        async with proxy(comfy_url=raw.url) as bound:
            waiting = await raw_client(bound.comfy_url)
            await begun.wait()
        head = await read_head(waiting.reader)
        await asyncio.wait_for(left.wait(), 5)
        await waiting.close()

    assert head[0].startswith(b"HTTP/1.1 503 ")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who left")
@pytest.mark.parametrize("more", [b"", b"\x81\x80\0\0\0\0"], ids=["silent", "a frame too early"])
async def test_a_client_that_leaves_during_the_handshake_ends_it(more: bytes) -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def handler(connection: Connection) -> None:
        await asked(connection)
        begun.set()
        assert await connection.rest() == b""
        left.set()

    async with RawUpstream(handler) as raw, proxy(comfy_url=raw.url) as bound:
        waiting = await raw_client(bound.comfy_url)
        await waiting.write(more)
        await begun.wait()
        await waiting.close()

        await asyncio.wait_for(left.wait(), 8)


async def test_what_comes_before_the_101_does_not_disturb() -> None:
    async def handler(connection: Connection) -> None:
        await connection.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
        await accept(connection)
        await connection.write(b"\x81\x02hi")
        await connection.rest()

    async with (
        RawUpstream(handler) as raw,
        proxy(comfy_url=raw.url) as bound,
        client(bound.comfy_url) as socket,
    ):
        assert await socket.receive_str() == "hi"


async def test_frames_in_one_piece_with_the_101_are_not_lost() -> None:
    async def handler(connection: Connection) -> None:
        write, pieces = connection.writer.write, []
        connection.writer.write = pieces.append  # type: ignore[method-assign]
        await accept(connection)
        write(b"".join(pieces) + b"\x81\x02hi")
        await connection.rest()

    async with (
        RawUpstream(handler) as raw,
        proxy(comfy_url=raw.url) as bound,
        client(bound.comfy_url) as socket,
    ):
        assert await socket.receive_str() == "hi"


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [((), None), (("comfy",), "comfy"), (("a", "comfy", "b"), "comfy"), (("a", "b"), None)],
)
async def test_the_upstream_chooses_the_subprotocol(
    offered: tuple[str, ...], chosen: str | None
) -> None:
    requests: list[web.Request] = []
    async with (
        upstream(echo, requests) as url,
        proxy(comfy_url=url) as bound,
        client(bound.comfy_url, protocols=offered) as socket,
    ):
        assert socket.protocol == chosen

    seen = requests[0].headers.get("Sec-WebSocket-Protocol")
    assert seen == (", ".join(offered) or None)


async def test_a_subprotocol_that_nobody_offered_reaches_no_client() -> None:
    async def handler(connection: Connection) -> None:
        await accept(connection, b"Sec-WebSocket-Protocol: a\x80b")
        await connection.rest()

    async with RawUpstream(handler) as raw, proxy(comfy_url=raw.url) as bound:
        waiting = await raw_client(bound.comfy_url, b"Sec-WebSocket-Protocol: other")
        head = await read_head(waiting.reader)
        await waiting.close()

    assert head[0].startswith(b"HTTP/1.1 101 ")
    assert not [line for line in head if line.lower().startswith(b"sec-websocket-protocol")]


async def test_compression_is_negotiated_on_neither_side() -> None:
    heads: list[list[bytes]] = []

    async def handler(connection: Connection) -> None:
        heads.append(await accept(connection))
        await connection.rest()

    async with RawUpstream(handler) as raw, proxy(comfy_url=raw.url) as bound:
        waiting = await raw_client(
            bound.comfy_url, b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"
        )
        head = await read_head(waiting.reader)
        await waiting.close()

    assert not [line for line in head + heads[0] if b"extensions" in line.lower()]


async def test_headers_are_those_of_a_good_proxy() -> None:
    heads: list[list[bytes]] = []

    async def handler(connection: Connection) -> None:
        heads.append(await accept(connection))
        await connection.rest()

    async with RawUpstream(handler) as raw:
        async with proxy(comfy_url=raw.url, ollama_url=raw.url, ollama_hosts=("a",)) as bound:
            for url in (bound.comfy_url, bound.ollama_url):
                waiting = await raw_client(
                    url,
                    b"Origin: http://a",
                    b"Cookie: b=\xe9",
                    b"X-Forwarded-For: 10.0.0.1",
                    b"X-Twice: 1",
                    b"X-Twice: 2",
                )
                await read_head(waiting.reader)
                await waiting.close()
        authority = raw.url.removeprefix("http://").encode()

    comfy, ollama = heads
    for head in heads:
        assert head[0] == b"GET /ws HTTP/1.1"
        assert b"cookie: b=\xe9" in head
        assert b"x-forwarded-for: 10.0.0.1, 127.0.0.1" in head
        assert b"x-forwarded-proto: http" in head
        assert b"x-forwarded-host: a" in head
        assert [line for line in head if line.startswith(b"x-twice")] == [
            b"x-twice: 1",
            b"x-twice: 2",
        ]
        assert [line.lower() for line in head if line.lower().startswith(b"connection")] == [
            b"connection: upgrade"
        ]
    assert b"host: a" in comfy
    assert b"origin: http://a" in comfy
    assert b"host: " + authority in ollama
    assert not [line for line in ollama if line.startswith(b"origin")]
