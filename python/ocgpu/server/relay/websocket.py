"""Relay one websocket: frames of any size, text and binary, with its close codes, both ways.

Frames pass by callbacks and not through a task for each direction: a task's wake-up per frame costs
as much as all the rest of ours. Each direction has one frame under way, so a side that takes none
holds the other side back, and what is kept meanwhile is bounded.

What the listener's side does not carry: the client's close reason, and whether a client that sent
no close code said farewell at all; its pings are answered there.
"""

import asyncio
import base64
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec

from ocgpu.server.relay.address import Address
from ocgpu.server.relay.asgi import Headers, Message, Receive, Scope, Send, header, target_of
from ocgpu.server.relay.connector import Connector
from ocgpu.server.relay.frames import BINARY, CLOSE, TEXT, FrameError
from ocgpu.server.relay.frames import Message as Frame
from ocgpu.server.relay.headers import legal
from ocgpu.server.relay.liveness import guard
from ocgpu.server.relay.upstream import UpstreamError
from ocgpu.server.relay.websocket_upstream import (
    HandshakeRefusedError,
    UpstreamSocket,
    handshake_request,
    open_socket,
)

__all__ = ["WebsocketRelay"]

# Set anew for the upstream. Extensions are negotiated by neither side: frames pass unpacked.
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
    (b"connection", b"upgrade", b"transfer-encoding", b"content-length", b"keep-alive")
)
# Status codes that Granian can send without ending the process.
_LEGAL_STATUS: Final = range(200, 600)
_NORMAL: Final = 1000
_GOING_AWAY: Final = 1001
_TOO_BIG: Final = 1009
_FAILED: Final = 1011
# Cut to fit a control frame, or Granian sends an illegal one.
_REASON_BYTES: Final = 123
_CLOSE_SECONDS: Final = 5.0
# An engine that computes under Python's lock may be silent for long, but not for ever.
_HANDSHAKE_SECONDS: Final = 60.0


class _Ends(NamedTuple):
    """How the two sides are closed: code and reason; the upstream's may lack a code."""

    client: tuple[int, str]
    upstream: tuple[int | None, str]


class WebsocketRelay:
    """Relays websockets to one upstream. To be made inside a running loop.

    Args:
        address: Where the upstream is; its login and its path prefix are used.
        connect_timeout: Seconds for a connection to stand.
        handshake_timeout: Seconds for the upstream to answer the handshake.
    """

    def __init__(
        self,
        address: Address,
        connect_timeout: float,
        *,
        handshake_timeout: float = _HANDSHAKE_SECONDS,
    ) -> None:
        self._address = address
        self._connector = Connector(address, connect_timeout)
        self._handshake_timeout = handshake_timeout

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
        presence = _Presence(scope)
        try:
            with presence:
                upstream, subprotocol = await self._open(scope, headers)
        except HandshakeRefusedError as refusal:
            await _reject(send, refusal)
        except UpstreamError as error:
            await _refuse(send, 502, "upstream", str(error))
        except asyncio.CancelledError:
            if presence.gone:
                return
            await _refuse(send, 503, "shutdown", "the proxy is shutting down")
            raise
        else:
            await _Splice(receive, send, upstream, scope).run(subprotocol)

    async def _open(self, scope: Scope, headers: Headers) -> tuple[UpstreamSocket, str | None]:
        """Shake hands with the upstream.

        Raises:
            HandshakeRefusedError: It does not want to.
            UpstreamError: It is not there, or makes no sense.
        """
        offered: list[str] = scope.get("subprotocols") or []
        key = base64.b64encode(os.urandom(16))
        kept = [h for h in headers if h[0] not in _HANDSHAKE]
        request = handshake_request(self._address, target_of(scope), kept, offered, key)
        upstream = await open_socket(self._connector, request)
        try:
            async with asyncio.timeout(self._handshake_timeout):
                answer = await upstream.answer(key)
        except TimeoutError:
            upstream.abort()
            message = f"no answer from {self._address.url} to a websocket's handshake in time"
            raise UpstreamError(message) from None
        except BaseException:
            upstream.abort()
            raise
        chosen = (header(answer, b"sec-websocket-protocol") or b"").decode("latin-1")
        # Granian ends the process on a value that no header may have: only what it gave passes.
        return upstream, chosen if chosen in offered else None


class _Presence:
    """Cancels the task inside it when the client leaves; before a 101 Granian does not tell."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._task = asyncio.current_task()
        self._release: Callable[[], None] = _nothing
        self.gone = False

    def __enter__(self) -> None:
        self._release = guard(self._scope, self._left)

    def __exit__(self, *_: object) -> None:
        self._release()

    def _left(self) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel()


class _Splice:
    """Passes messages between a client and an upstream until one of them ends."""

    def __init__(
        self, receive: Receive, send: Send, upstream: UpstreamSocket, scope: Scope
    ) -> None:
        self._scope = scope
        self._release: Callable[[], None] = _nothing
        self._receive = receive
        self._send = send
        self._upstream = upstream
        self._receiving: Any = None
        self._sending: Any = None
        self._held: Message | None = None
        self._ended: asyncio.Future[_Ends] = asyncio.get_running_loop().create_future()

    async def run(self, subprotocol: str | None) -> None:
        """Accept the client and pass messages; both sides are closed when this returns or raises.

        Args:
            subprotocol: The one that the upstream chose.
        """
        ends = _Ends((_GOING_AWAY, "the proxy is shutting down"), (_GOING_AWAY, ""))
        accept = {"type": "websocket.accept", "subprotocol": subprotocol}
        accepting = asyncio.ensure_future(_awaited(self._send(accept)))
        try:
            await asyncio.shield(accepting)
            self._upstream.start(self._pump, self._room)
            self._pump()
            self._listen()
            ends = await self._ended
        finally:
            self._ended.cancel()
            self._upstream.stop()
            self._release()
            # A close that overtakes the accept is lost.
            await accepting
            await asyncio.gather(
                self._close_client(*ends.client),
                self._upstream.close(*ends.upstream, _CLOSE_SECONDS),
            )

    def _pump(self) -> None:
        """Send the upstream's next message unless one is under way."""
        if self._sending is not None or self._ended.done():
            return
        message = self._upstream.take()
        if message is None or message.kind == CLOSE:
            if self._upstream.ended:
                self._end(_of_upstream(message, self._upstream.fault))
            return
        kind = "text" if message.kind == TEXT else "bytes"
        self._sending = _future(
            self._send(
                {
                    "type": "websocket.send",
                    kind: message.data if message.text is None else message.text,
                }
            )
        )
        self._sending.add_done_callback(self._sent)

    def _sent(self, future: "asyncio.Future[None]") -> None:
        self._sending = None
        if not future.cancelled() and future.exception() is None:
            self._pump()
        # Else the client is gone, which `receive` tells.

    def _listen(self) -> None:
        """Ask for the client's next message, unless one is asked for or held."""
        if self._receiving is None and self._held is None and not self._ended.done():
            self._receiving = _future(self._receive())
            self._receiving.add_done_callback(self._received)

    def _received(self, future: "asyncio.Future[Message]") -> None:
        self._receiving = None
        if future.cancelled() or self._ended.done():
            return
        message = {"code": None} if future.exception() is not None else future.result()
        if message.get("type") != "websocket.receive":
            self._left(message.get("code"))
        elif self._upstream.writable:
            self._forward(message)
            # While the upstream takes nothing, one message more tells whether the client is there.
            self._listen()
        else:
            self._held = message
            self._release = guard(self._scope, self._left)

    def _left(self, code: int | None = None) -> None:
        # A client that said farewell has its answer already and sees nothing of this one.
        self._end(_Ends((_TOO_BIG, "a frame of more than 16 MiB, or none"), (_legal(code), "")))

    def _room(self) -> None:
        """Go on: the upstream takes messages again."""
        held, self._held = self._held, None
        self._release()
        if held is not None:
            self._forward(held)
        self._listen()

    def _forward(self, message: Message) -> None:
        data = message.get("bytes")
        if data is not None:
            self._upstream.send(BINARY, data)
        else:
            self._upstream.send(TEXT, message["text"].encode())

    def _end(self, ends: _Ends) -> None:
        if not self._ended.done():
            self._ended.set_result(ends)

    async def _close_client(self, code: int, reason: str) -> None:
        """Send the client a close frame, or the answer to its own.

        What is under way is ended before: Granian's close waits for ever behind a send that a
        stalled client does not take. The references are dropped by hand, because its futures are
        opaque to the garbage collector.
        """
        pending = (self._receiving, self._sending)
        self._receiving = self._sending = self._held = None
        for future in pending:
            if future is not None:
                future.cancel()
        closing = self._send({"type": "websocket.close", "code": code, "reason": reason})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await closing


def _nothing() -> None:
    """Nobody is looked for."""


def _of_upstream(message: Frame | None, fault: FrameError | None) -> _Ends:
    """Tell how both sides are closed after the upstream has ended.

    Args:
        message: Its close frame, None when it sent none.
        fault: How it broke the protocol, None when it did not.
    """
    if fault is not None:
        return _Ends((_FAILED, f"the upstream sent {fault}"), (fault.code, ""))
    if message is None:
        return _Ends((_FAILED, "the upstream is gone"), (None, ""))
    payload = message.data
    code = _legal(int.from_bytes(payload[:2], "big")) if payload else None
    reason = payload[2:].decode(errors="replace").encode()[:_REASON_BYTES].decode(errors="ignore")
    return _Ends((code or _NORMAL, reason), (code, ""))


def _legal(code: int | None) -> int | None:
    """Give the close code if it may stand on the wire (RFC 6455 section 7.4), else None."""
    if code is None:
        return None
    legal_code = 1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999
    return code if legal_code else None


def _future(awaitable: Awaitable[Any]) -> Any:  # noqa: ANN401 - Granian's own, or asyncio's
    """Give something with `add_done_callback`: Granian's own future where there is one."""
    if hasattr(awaitable, "add_done_callback"):
        return awaitable
    return asyncio.ensure_future(_awaited(awaitable))


async def _awaited(awaitable: Awaitable[Any]) -> Any:  # noqa: ANN401 - passed on
    return await awaitable


async def _reject(send: Send, refusal: HandshakeRefusedError) -> None:
    """Pass a refused handshake on.

    Granian ends the whole process on an illegal status or header here, so all is checked.
    """
    headers = [h for h in refusal.headers if h[0] not in _REJECTION_DROP]
    if refusal.status not in _LEGAL_STATUS or not legal(headers):
        await _refuse(send, 502, "upstream", "the upstream's answer to the handshake is illegal")
    else:
        await _respond(send, refusal.status, headers, refusal.body)


async def _refuse(send: Send, status: int, reason: str, message: str) -> None:
    """Answer a handshake with an error of our own, in the form of all others."""
    body = msgspec.json.encode({"error": message, "reason": reason})
    await _respond(send, status, [(b"content-type", b"application/json")], body)


async def _respond(send: Send, status: int, headers: Headers, body: bytes) -> None:
    start = {"type": "websocket.http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": body})
