"""Websockets through a real listener: frames, close codes, refusals."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from tests.server.inloop import proxy
from tests.server.websocket_peers import client, echo, upstream

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

MIB = 2**20


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


async def test_a_drain_closes_websockets_as_going_away() -> None:
    async with upstream(echo) as url:
        async with proxy(comfy_url=url) as bound:
            session = aiohttp.ClientSession()
            socket = await session.ws_connect(f"{bound.comfy_url}/ws")
        message = await socket.receive()
        await socket.close()
        await session.close()

    assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1001)
