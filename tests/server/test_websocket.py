"""Websockets through a real listener: frames, close codes, refusals."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from tests.server.inloop import Connection, RawUpstream, proxy

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

MIB = 2**20
Play = Callable[[web.WebSocketResponse], Awaitable[None]]


@asynccontextmanager
async def upstream(play: Play, requests: list[web.Request] | None = None) -> AsyncIterator[str]:
    """A websocket server whose connections are played by a function."""

    async def handle(request: web.Request) -> web.WebSocketResponse:
        if requests is not None:
            requests.append(request)
        socket = web.WebSocketResponse(protocols=("comfy",), max_msg_size=0, autoping=False)
        await socket.prepare(request)
        await play(socket)
        return socket

    app = web.Application()
    app.router.add_get("/ws", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def echo(socket: web.WebSocketResponse) -> None:
    async for message in socket:
        if message.type is aiohttp.WSMsgType.TEXT:
            await socket.send_str(message.data)
        else:
            await socket.send_bytes(message.data)


@asynccontextmanager
async def client(url: str, **options: object) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(
            URL(f"{url}/ws?clientId=a%2Fb", encoded=True), max_msg_size=0, **options
        ) as socket,
    ):
        yield socket


async def test_text_and_binary_frames_pass_both_ways() -> None:
    requests: list[web.Request] = []
    async with upstream(echo, requests) as url, proxy(comfy_url=url) as bound:
        async with client(bound.comfy_url, protocols=("comfy",)) as socket:
            await socket.send_str("grüße")
            assert await socket.receive_str() == "grüße"
            await socket.send_bytes(b"\x00\x01")
            assert await socket.receive_bytes() == b"\x00\x01"
            await socket.send_str("")
            assert await socket.receive_str() == ""
            assert socket.protocol == "comfy"

        assert requests[0].raw_path == "/ws?clientId=a%2Fb"
        assert requests[0].headers["Host"] == bound.comfy_url.removeprefix("http://")


async def test_a_frame_larger_than_any_default_limit_passes() -> None:
    async def send_large(socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(bytes(24 * MIB))
        await socket.receive()

    async with (
        upstream(send_large) as url,
        proxy(comfy_url=url) as bound,
        client(bound.comfy_url) as socket,
    ):
        assert len(await socket.receive_bytes()) == 24 * MIB


async def test_a_large_frame_passes_upwards() -> None:
    async with (
        upstream(echo) as url,
        proxy(comfy_url=url) as bound,
        client(bound.comfy_url) as socket,
    ):
        await socket.send_bytes(bytes(8 * MIB))
        assert len(await socket.receive_bytes()) == 8 * MIB


async def test_the_upstreams_close_code_and_reason_reach_the_client() -> None:
    async def close(socket: web.WebSocketResponse) -> None:
        await socket.close(code=4001, message=b"bye")

    async with (
        upstream(close) as url,
        proxy(comfy_url=url) as bound,
        client(bound.comfy_url) as socket,
    ):
        message = await socket.receive()

    assert (message.type, message.data, message.extra) == (aiohttp.WSMsgType.CLOSE, 4001, "bye")


async def test_the_clients_close_code_reaches_the_upstream() -> None:
    codes: asyncio.Queue[int] = asyncio.Queue()

    async def wait(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        codes.put_nowait(socket.close_code)

    async with upstream(wait) as url, proxy(comfy_url=url) as bound:
        async with client(bound.comfy_url) as socket:
            await socket.close(code=4002)
        assert await codes.get() == 4002


async def test_an_upstream_that_vanishes_closes_the_client_as_abnormal() -> None:
    async def vanish(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        socket._req.transport.abort()

    async with (
        upstream(vanish) as url,
        proxy(comfy_url=url) as bound,
        client(bound.comfy_url) as socket,
    ):
        await socket.send_str("go")
        message = await socket.receive()

    assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1011)


async def test_a_refused_handshake_with_repeated_headers_passes_and_ends_no_process() -> None:
    async def refuse(connection: Connection) -> None:
        await connection.head()
        await connection.write(
            b"HTTP/1.1 403 Forbidden\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n"
            b"X-Why: origin\r\nContent-Length: 0\r\n\r\n"
        )

    async with RawUpstream(refuse) as raw, proxy(comfy_url=raw.url) as bound:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            async with client(bound.comfy_url):
                pass

    assert refusal.value.status == 403
    assert refusal.value.headers is not None
    assert refusal.value.headers["X-Why"] == "origin"


@pytest.mark.parametrize("status", [b"099", b"999", b"200"])
async def test_an_odd_refusal_of_a_handshake_ends_no_process(status: bytes) -> None:
    async def refuse(connection: Connection) -> None:
        await connection.head()
        await connection.write(b"HTTP/1.1 " + status + b" Odd\r\nContent-Length: 0\r\n\r\n")

    async with RawUpstream(refuse) as raw, proxy(comfy_url=raw.url) as bound:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            async with client(bound.comfy_url):
                pass

    assert refusal.value.status == (200 if status == b"200" else 502)


async def test_no_upstream_is_a_502() -> None:
    async with RawUpstream(lambda _connection: asyncio.sleep(0)) as gone:
        url = gone.url
    async with proxy(comfy_url=url) as bound:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            async with client(bound.comfy_url):
                pass

    assert refusal.value.status == 502


async def test_a_drain_closes_websockets_as_going_away() -> None:
    async with upstream(echo) as url:
        async with proxy(comfy_url=url) as bound:
            session = aiohttp.ClientSession()
            socket = await session.ws_connect(f"{bound.comfy_url}/ws")
        message = await socket.receive()
        await socket.close()
        await session.close()

    assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1001)
