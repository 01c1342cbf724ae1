"""Relay one websocket: frames of any size, text and binary, with its close codes, both ways.

aiohttp on the upstream's side: measured, three libraries cost the same here because Granian's side
dominates, and aiohttp alone sends any `Host` that it is told to.
"""

import asyncio
import contextlib
from typing import Final

import aiohttp
from yarl import URL

from ocgpu.server.relay.aiohttp_upstream import open_session, text_headers
from ocgpu.server.relay.asgi import Headers, Receive, Scope, Send, target_of

__all__ = ["WebsocketRelay"]

# Set by each side's own library. Extensions are negotiated by neither: frames pass unpacked.
_HANDSHAKE: Final = frozenset(
    (
        b"sec-websocket-key",
        b"sec-websocket-version",
        b"sec-websocket-extensions",
        b"sec-websocket-protocol",
        b"content-length",
    )
)
_REJECTION_DROP: Final = frozenset(
    ("connection", "upgrade", "transfer-encoding", "content-length", "keep-alive")
)
_GOING_AWAY: Final = 1001
_ABNORMAL: Final = 1011
_NORMAL: Final = 1000
_REASON_BYTES: Final = 123
_CLOSE_TIMEOUT: Final = 5.0
_Close = tuple[int, str]


class WebsocketRelay:
    """Relays websockets to one upstream. To be made inside a running loop.

    Args:
        url: The upstream's scheme, host and port.
        connect_timeout: Seconds for a connection to stand.
    """

    def __init__(self, url: str, connect_timeout: float) -> None:
        self._url = url.rstrip("/")
        self._session = open_session(connect_timeout, fresh=False)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def relay(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """Relay a websocket until one side closes it; a cancelled relay closes with 1001.

        Args:
            scope: The connection's scope.
            receive: The connection's `receive`.
            send: The connection's `send`.
            headers: The client's headers with the engine's Host rule applied.
        """
        if (await receive())["type"] != "websocket.connect":
            return
        url = URL(self._url + target_of(scope).decode("latin-1"), encoded=True)
        try:
            upstream = await self._session.ws_connect(
                url,
                headers=text_headers([h for h in headers if h[0] not in _HANDSHAKE]),
                protocols=scope.get("subprotocols", ()),
                autoping=True,
                autoclose=True,
                max_msg_size=0,
                compress=0,
                timeout=aiohttp.ClientWSTimeout(ws_receive=None, ws_close=_CLOSE_TIMEOUT),
            )
        except aiohttp.WSServerHandshakeError as error:
            await _reject(send, error)
            return
        except (aiohttp.ClientError, OSError, ValueError):
            await _respond(send, 502, [], b"the upstream takes no websocket\n")
            return
        try:
            await send({"type": "websocket.accept", "subprotocol": upstream.protocol})
            close = await _splice(receive, send, upstream)
            if close is not None:
                await _close(send, close)
        except asyncio.CancelledError:
            await _close(send, (_GOING_AWAY, "the proxy is shutting down"))
            raise
        finally:
            await upstream.close()


async def _splice(
    receive: Receive, send: Send, upstream: aiohttp.ClientWebSocketResponse
) -> _Close | None:
    """Pass frames until one side ends; give how to close the client, None when it has left.

    Granian's close waits for ever while a `receive()` is pending, so both directions have ended
    when this returns or raises.
    """
    up = asyncio.ensure_future(_to_upstream(receive, upstream))
    down = asyncio.ensure_future(_to_client(send, upstream))
    try:
        await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        if up.done() and up.exception() is None:
            return None
        if down.done() and down.exception() is None:
            return down.result()
        return _ABNORMAL, ""
    finally:
        up.cancel()
        down.cancel()
        await asyncio.gather(up, down, return_exceptions=True)


async def _close(send: Send, close: _Close) -> None:
    await send({"type": "websocket.close", "code": close[0], "reason": close[1]})


async def _to_upstream(receive: Receive, upstream: aiohttp.ClientWebSocketResponse) -> None:
    while True:
        message = await receive()
        if message["type"] != "websocket.receive":
            await upstream.close(code=_legal(message.get("code")) or _NORMAL)
            return
        data = message.get("bytes")
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            # A closed upstream is seen, with its code, by the other direction.
            if data is not None:
                await upstream.send_bytes(data)
            else:
                await upstream.send_str(message["text"])


async def _to_client(send: Send, upstream: aiohttp.ClientWebSocketResponse) -> _Close:
    while True:
        message = await upstream.receive()
        kind = message.type
        if kind is aiohttp.WSMsgType.TEXT:
            await send({"type": "websocket.send", "text": message.data})
        elif kind is aiohttp.WSMsgType.BINARY:
            await send({"type": "websocket.send", "bytes": message.data})
        elif kind is aiohttp.WSMsgType.CLOSE:
            return _legal(message.data) or _NORMAL, _short(message.extra or "")
        elif kind in (aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR):
            return _legal(upstream.close_code) or _ABNORMAL, ""


def _legal(code: int | None) -> int | None:
    """Give the close code if it may stand on the wire (RFC 6455 section 7.4), else None."""
    if code is None:
        return None
    legal = 1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999
    return code if legal else None


def _short(reason: str) -> str:
    """Cut a close reason to what a control frame may carry."""
    return reason.encode()[:_REASON_BYTES].decode(errors="ignore")


async def _reject(send: Send, error: aiohttp.WSServerHandshakeError) -> None:
    """Pass a refused handshake on.

    Granian ends the whole process on a repeated header name, an illegal status or a line break in
    a value here, so each name goes out once and everything is checked.
    """
    once: dict[bytes, bytes] = {}
    for name, value in (error.headers or {}).items():
        low = name.lower()
        if low not in _REJECTION_DROP and "\n" not in value and "\r" not in value:
            once.setdefault(low.encode("latin-1"), value.encode("latin-1", "replace"))
    status = error.status if 200 <= error.status <= 599 else 502
    await _respond(send, status, list(once.items()), b"")


async def _respond(send: Send, status: int, headers: Headers, body: bytes) -> None:
    start = {"type": "websocket.http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": body})
