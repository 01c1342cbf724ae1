"""Both ends of a relayed websocket: by library, and frame by frame over raw connections."""

import base64
import hashlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from yarl import URL

from tests.server.inloop import Connection, connect

__all__ = [
    "CLOSE",
    "Play",
    "accept",
    "asked",
    "client",
    "close_frame",
    "echo",
    "frame",
    "raw_client",
    "read_frame",
    "upstream",
]

MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
Play = Callable[[web.WebSocketResponse], Awaitable[None]]


@asynccontextmanager
async def upstream(play: Play, requests: list[web.Request] | None = None) -> AsyncIterator[str]:
    """A websocket server whose connections are played by a function."""

    async def handle(request: web.Request) -> web.WebSocketResponse:
        if "Upgrade" not in request.headers:
            # A probe of serve's own.
            raise web.HTTPNotFound
        if requests is not None:
            requests.append(request)
        socket = web.WebSocketResponse(protocols=("comfy",), max_msg_size=0, autoping=False)
        await socket.prepare(request)
        await play(socket)
        return socket

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def echo(socket: web.WebSocketResponse) -> None:
    """Send everything back."""
    async for message in socket:
        if message.type is aiohttp.WSMsgType.TEXT:
            await socket.send_str(message.data)
        else:
            await socket.send_bytes(message.data)


@asynccontextmanager
async def client(
    url: str | None, path: str = "/ws?clientId=a%2Fb", **options: object
) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A client of aiohttp with its limits off."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(URL(f"{url}{path}", encoded=True), max_msg_size=0, **options) as socket,
    ):
        yield socket


async def asked(connection: Connection) -> list[bytes]:
    """Read a handshake's lines on a raw upstream; serve's own probes get a 404 and no further."""
    head = await connection.head()
    if b"upgrade: websocket" not in head:
        await connection.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        raise ConnectionResetError
    return head


async def accept(connection: Connection, *more: bytes) -> list[bytes]:
    """Accept a handshake on a raw upstream; `more` are header lines. The request's lines."""
    head = await asked(connection)
    key = next(line[19:] for line in head if line.lower().startswith(b"sec-websocket-key: "))
    digest = base64.b64encode(hashlib.sha1(key + MAGIC, usedforsecurity=False).digest())
    lines = [
        b"HTTP/1.1 101 Switching Protocols",
        b"Upgrade: websocket",
        b"Connection: Upgrade",
        b"Sec-WebSocket-Accept: " + digest,
        *more,
    ]
    await connection.write(b"\r\n".join(lines) + b"\r\n\r\n")
    return head


async def raw_client(url: str | None, *more: bytes) -> Connection:
    """Shake hands as a raw client; `more` are header lines."""
    assert url is not None
    connection = await connect(url)
    lines = [
        b"GET /ws HTTP/1.1",
        b"Host: a",
        b"Upgrade: websocket",
        b"Connection: Upgrade",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: " + KEY,
        *more,
    ]
    await connection.write(b"\r\n".join(lines) + b"\r\n\r\n")
    return connection


def frame(kind: int, payload: bytes = b"", *, final: bool = True, masked: bool = False) -> bytes:
    """One frame; a masked one has a key of zeros, so that its payload stands as it is."""
    size = len(payload)
    first = (0x80 if final else 0) | kind
    bit = 0x80 if masked else 0
    if size < 126:
        head = struct.pack("!BB", first, bit | size)
    elif size < 2**16:
        head = struct.pack("!BBH", first, bit | 126, size)
    else:
        head = struct.pack("!BBQ", first, bit | 127, size)
    return head + (bytes(4) if masked else b"") + payload


def close_frame(code: int, reason: bytes = b"") -> bytes:
    """A server's close frame."""
    return frame(CLOSE, struct.pack("!H", code) + reason)


async def read_frame(connection: Connection) -> tuple[int, bytes]:
    """Read one frame from either side: its kind and its payload, unmasked."""
    first, size = await connection.read(2)
    assert first & 0x70 == 0
    masked, size = size & 0x80, size & 0x7F
    if size >= 126:
        size = int.from_bytes(await connection.read(2 if size == 126 else 8), "big")
    key = await connection.read(4) if masked else bytes(4)
    payload = await connection.read(size)
    return first & 0xF, bytes(byte ^ key[at % 4] for at, byte in enumerate(payload))
