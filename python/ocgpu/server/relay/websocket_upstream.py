"""The upstream's end of a relayed websocket: handshake, frames, flow control, close."""

import asyncio
import base64
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import httptools

from ocgpu.server.relay.address import Address
from ocgpu.server.relay.asgi import Headers, header
from ocgpu.server.relay.connector import Connector
from ocgpu.server.relay.frames import (
    CLOSE,
    PING,
    PONG,
    Decoder,
    FrameError,
    Message,
    close_payload,
    encode,
)
from ocgpu.server.relay.keepalive import keep_alive
from ocgpu.server.relay.upstream import UpstreamError

__all__ = ["HandshakeRefusedError", "UpstreamSocket", "handshake_request", "open_socket"]

# RFC 6455 section 1.3.
_MAGIC: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_SWITCHING: Final = 101
_HEAD_MAX: Final = 2**20
# Of a refusal's body more than this is cut: it is held whole, as the listener's side wants it.
_REFUSAL_MAX: Final = 2**20
# Whole messages that wait for the client, in bytes; one more and one read of the socket may come.
_QUEUE_MAX: Final = 2**18
# So many small messages cost as much as their objects do.
_MESSAGE_COST: Final = 256
# An upstream that vanished while something was under way to it is given up after this.
_UNACKNOWLEDGED_MS: Final = 60_000


class HandshakeRefusedError(Exception):
    """The upstream answered the handshake with something else.

    Attributes:
        status: Its status, whatever it is.
        headers: Its headers, names in lower case.
        body: Its body.
    """

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"handshake refused: {status}")
        self.status = status
        self.headers = headers
        self.body = body


async def open_socket(connector: Connector, request: bytes) -> "UpstreamSocket":
    """Connect and send the handshake; the answer is still to come.

    Raises:
        UpstreamConnectError: No connection came about.
    """
    transport, protocol = await connector.connect(UpstreamSocket)
    keep_alive(transport.get_extra_info("socket"), _UNACKNOWLEDGED_MS)
    transport.write(request)
    return protocol


def handshake_request(
    address: Address, target: bytes, headers: Headers, subprotocols: Sequence[str], key: bytes
) -> bytes:
    """Give the bytes of a handshake; no extension is offered, so frames pass unpacked."""
    lines = [b"GET " + address.prefix + target + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in headers if name != b"authorization"]
    login = address.authorization or header(headers, b"authorization")
    if login is not None:
        lines.append(b"authorization: " + login)
    if subprotocols:
        lines.append(b"sec-websocket-protocol: " + ", ".join(subprotocols).encode("latin-1"))
    lines += [
        b"upgrade: websocket",
        b"connection: Upgrade",
        b"sec-websocket-version: 13",
        b"sec-websocket-key: " + key,
        b"\r\n",
    ]
    return b"\r\n".join(lines)


class UpstreamSocket(asyncio.Protocol):
    """One websocket to an upstream. Made by `open_socket`; used in one loop.

    First `answer` says how the handshake ended. Then `start` names who is told of messages and of
    room to write; what came before that waits here.

    Attributes:
        writable: Whether the upstream takes more; `start`'s `on_room` says when it does again.
        ended: Whether no more will come after what `take` gives.
        fault: Set when the upstream broke the protocol.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._handshake: _Handshake | None = _Handshake()
        self._decoder = Decoder()
        self._queue: deque[Message] = deque()
        self._queued = 0
        self._on_message: Callable[[], None] = _nothing
        self._on_room: Callable[[], None] = _nothing
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reading = True
        self.writable = True
        self.ended = False
        self.fault: FrameError | None = None

    async def answer(self, key: bytes) -> Headers:
        """Wait for the answer to the handshake.

        Args:
            key: The one that was sent.

        Returns:
            The headers of the 101.

        Raises:
            HandshakeRefusedError: The upstream does not want to.
            UpstreamError: It gave no answer, or one that makes no sense.
        """
        handshake = self._handshake
        if handshake is None:
            raise RuntimeError("the handshake is over")
        status, headers = await handshake.done
        if status != _SWITCHING:
            raise HandshakeRefusedError(status, headers, bytes(handshake.body))
        digest = hashlib.sha1(key + _MAGIC, usedforsecurity=False).digest()
        if header(headers, b"sec-websocket-accept") != base64.b64encode(digest):
            raise UpstreamError("the upstream's answer to the handshake is none")
        if header(headers, b"sec-websocket-extensions") is not None:
            raise UpstreamError("the upstream uses a websocket extension that nobody offered")
        return headers

    def start(self, on_message: Callable[[], None], on_room: Callable[[], None]) -> None:
        """Begin to tell of messages and of room to write."""
        self._on_message = on_message
        self._on_room = on_room

    def stop(self) -> None:
        """Tell nobody any more."""
        self._on_message = self._on_room = _nothing

    def take(self) -> Message | None:
        """Give the next message; None when there is none yet, or, when `ended`, never again."""
        if not self._queue:
            return None
        message = self._queue.popleft()
        self._queued -= len(message.data) + _MESSAGE_COST
        if not self._reading and self._queued <= _QUEUE_MAX // 2 and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()
        return message

    def send(self, kind: int, payload: bytes) -> None:
        """Send a frame; the caller heeds `writable`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(kind, payload))

    async def close(self, code: int | None, reason: str, timeout: float) -> None:
        """Send a close frame, wait for the upstream's, then for the connection's end.

        Args:
            code: None sends a close frame without one.
            reason: What it says.
            timeout: Seconds; then the connection is cut.
        """
        self.send(CLOSE, close_payload(code, reason))
        self._on_message = self._drop
        self._drop()
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._lost)
        except TimeoutError:
            pass
        finally:
            self.abort()

    def abort(self) -> None:
        """Cut the connection, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._handshake is not None:
            rest = self._handshake.feed(data)
            if rest is None:
                return
            self._handshake = None
            data = rest
        if self.ended or not data:
            return
        try:
            messages = self._decoder.feed(data)
        except FrameError as error:
            self.fault = error
            self._end()
            return
        for message in messages:
            self._took(message)
        if self._queued > _QUEUE_MAX and self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()
        if self._queue or self.ended:
            self._on_message()

    def eof_received(self) -> bool:
        """See `asyncio.Protocol`."""
        if self._handshake is not None:
            self._handshake.eof()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._handshake is not None:
            self._handshake.eof()
        self._transport = None
        if not self._lost.done():
            self._lost.set_result(None)
        # What came of a message that will never be whole; the cycles here would keep it.
        self._decoder.clear()
        self.writable = True
        self._on_room()
        self._end()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.writable = False

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.writable = True
        self._on_room()

    def _took(self, message: Message) -> None:
        if message.kind == PING:
            # A later ping's pong answers for all before it (RFC 6455 section 5.5.3).
            if self.writable:
                self.send(PONG, message.data)
        elif message.kind != PONG and not self.ended:
            self._queue.append(message)
            self._queued += len(message.data) + _MESSAGE_COST
            if message.kind == CLOSE:
                self._end()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._on_message()

    def _drop(self) -> None:
        """Read on to the upstream's close frame, then let the connection go."""
        while message := self.take():
            if message.kind == CLOSE and self._transport is not None:
                self._transport.close()


class _Handshake:
    """Reads the answer to a handshake; its methods without docstrings are httptools' callbacks.

    Attributes:
        done: Status and headers, once a 101's head or a whole refusal is here.
        body: The refusal's body.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[tuple[int, Headers]] = loop.create_future()
        self.body = bytearray()
        self._headers: Headers = []
        self._size = 0
        self._head_whole = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes; give those behind a 101's head, None before."""
        if self.done.done():
            return None
        self._size += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._finish()
            return data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self._fail(f"the upstream's answer to the handshake is none: {error}")
        if len(self.body) > _REFUSAL_MAX:
            del self.body[_REFUSAL_MAX:]
            self._finish()
        elif self._size > _HEAD_MAX and not self._head_whole:
            self._fail("the head of the upstream's answer to the handshake has no end")
        return None

    def eof(self) -> None:
        """The connection has ended: so has a body without a length."""
        if self._head_whole:
            self._finish()
        else:
            self._fail("the upstream closed the connection instead of answering the handshake")

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result((self._parser.get_status_code(), self._headers))

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(UpstreamError(message))

    def on_message_begin(self) -> None:
        self._headers = []
        self._head_whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._head_whole = True
        if self._parser.get_status_code() < 100:
            self._fail("the upstream's answer to the handshake has an illegal status")

    def on_body(self, body: bytes) -> None:
        if len(self.body) <= _REFUSAL_MAX:
            self.body += body

    def on_message_complete(self) -> None:
        # What comes before the answer proper, as 103, has a message of its own.
        if self._parser.get_status_code() >= 200:
            self._finish()


def _nothing() -> None:
    """Told nobody."""
