"""One HTTP/1.1 connection to an upstream, on a bare protocol with llhttp as the parser.

Measured against aiohttp it costs half the CPU of a request. Bytes of a body are never gathered
here: they are taken as they arrive, and reading stops while nobody takes them.

What an upstream may not do, because Granian would end the whole process or the client would see
something else than was sent, is refused when the head is complete: a status outside 200 to 599, a
header that is no header, thousands of them, a transfer coding besides `chunked`, a switch of
protocols that nobody asked for (RFC 9110 section 15, RFC 9112 sections 6 and 9).
"""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, cast

import httptools

from ocgpu.server.relay.headers import NAME_MAX, legal
from ocgpu.server.relay.upstream import BrokenResponseError, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ocgpu.server.relay.asgi import Headers

__all__ = ["Connection"]

_STATUS: Final = range(200, 600)
_FINAL: Final = 200
_SWITCHING: Final = 101
_BODYLESS: Final = frozenset((204, 304))
_VERSIONS: Final = frozenset(("1.1", "1.0"))
_HEAD_MAX_BYTES: Final = 2**20
# Granian's header map ends the process beyond some 24,000 entries.
_HEADERS_MAX: Final = 1000
# Beyond this many bytes that nobody has taken, reading stops.
_UNREAD_MAX_BYTES: Final = 2**18


class Connection(asyncio.Protocol):
    """A connection, and the exchange that goes on on it: one request, then its answer.

    Args:
        url: The upstream's, for messages.
        gone: Told when the connection ends, or must end, outside of an exchange.

    Attributes:
        status: Of the answer, 0 until its head is complete.
        headers: Of the answer.
        complete: Whether the answer arrived whole.
        error: Why no more will come of the answer; None while it may.
        answered: Whether a byte of the answer came.
        reused: Whether an exchange went before this one.
        fresh: Whether it was opened for one request, though others stood idle.
        sink: Called when something arrived or ended; for a reader that is no coroutine.
    """

    def __init__(self, url: str, gone: "Callable[[Connection], None]") -> None:
        self._url = url
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._open = False
        self._busy = False
        self._writable: asyncio.Future[None] | None = None
        self._write_paused = False
        self._used = False
        self.reused = False
        self.fresh = False
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: deque[bytes] = deque()
        self._unread = 0
        self._read_paused = False
        self._head_bytes = 0
        self._bodyless = False
        self._ends_with_connection = False
        self._keep = False
        self._sent = False
        self.sink: Callable[[], None] | None = None
        self.status = 0
        self.headers: Headers = []
        self.complete = False
        self.error: Exception | None = None
        self.answered = False

    # The exchange.

    def begin(self, message: bytes, *, bodyless: bool, whole: bool) -> None:
        """Send a request, or its head.

        Args:
            message: Its bytes.
            bodyless: The answer has no body, whatever its head says: the method is HEAD.
            whole: Nothing of the request follows; else `end_request` says when all was written.
        """
        if self._used:
            self.reused = True
            self._reset()
        self._busy = True
        self._bodyless = bodyless
        self._sent = whole
        if self._open:
            self._transport.write(message)
        else:
            self.fail(UpstreamError(f"no answer from {self._url}: it closed the connection"))

    async def write(self, data: bytes) -> None:
        """Send a piece of the request's body; returns when the upstream may take more."""
        if self._open:
            self._transport.write(data)
        if self._write_paused and self._open:
            self._writable = self._loop.create_future()
            try:
                await self._writable
            finally:
                self._writable = None

    def end_request(self, last: bytes = b"") -> None:
        """Send what ends the request's body; the request was written whole."""
        if last and self._open:
            self._transport.write(last)
        self._sent = True

    async def head(self) -> None:
        """Wait for the answer's head.

        Raises:
            UpstreamError: None came, or none that can be passed on.
        """
        while not self.status and self.error is None:
            await self._wait()
        if not self.status and self.error is not None:
            raise self.error

    async def read(self) -> bytes:
        """Wait for the next piece of the body; see `UpstreamResponse.read`."""
        while True:
            if self._pieces:
                return self.take()
            if self.complete:
                return b""
            if self.error is not None:
                raise self.error
            await self._wait()

    def take(self) -> bytes:
        """Give what has arrived of the body; b"" when there is nothing."""
        pieces = self._pieces
        if not pieces:
            return b""
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._unread = 0
        if self._read_paused:
            self.resume_reading()
        return data

    def pause_reading(self) -> None:
        """Take nothing from the upstream until `resume_reading`."""
        if self._open and not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on."""
        if self._read_paused:
            self._read_paused = False
            if self._open:
                self._transport.resume_reading()

    def finish(self) -> bool:
        """End the exchange; False when the connection is of no use for another one.

        An answer that is not whole is aborted, and the upstream sees its client leave.
        """
        self.sink = None
        usable = self._open and self.complete and self._keep and self._sent
        self._busy = False
        self._used = True
        if usable:
            self.resume_reading()
        else:
            self.abort()
        return usable

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: Exception) -> None:
        """End the exchange with an error, unless its answer is whole."""
        self._keep = False
        if not self.complete and self.error is None:
            self.error = error
        self.abort()
        self._wake()

    # Events of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self._transport = cast("asyncio.Transport", transport)
        self._open = True

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if not self._busy:
            # Bytes that answer no request would be taken for the answer to the next one.
            self._keep = False
            self.abort()
            self._gone(self)
            return
        self.answered = True
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail(UpstreamError(f"unasked switch of protocols by {self._url}"))
        except httptools.HttpParserError as error:
            self._broken(f"no HTTP from {self._url}: {error}")
        if not self.status and self._head_bytes > _HEAD_MAX_BYTES:
            self.fail(UpstreamError(f"endless head from {self._url}"))
        self._wake()

    def eof_received(self) -> None:
        """The upstream sends no more."""
        if self.status and self._ends_with_connection and self.error is None:
            self.complete = True
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection ended."""
        self._open = False
        if not self._busy:
            self._gone(self)
        elif not self.complete:
            reason = str(error) if error is not None else "it closed the connection"
            self._broken(
                f"no {'end of the ' if self.status else ''}answer from {self._url}: {reason}"
            )
        writable = self._writable
        if writable is not None and not writable.done():
            writable.set_result(None)
        self._wake()

    def pause_writing(self) -> None:
        """The upstream takes no more for now."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """It takes more."""
        self._write_paused = False
        writable = self._writable
        if writable is not None and not writable.done():
            writable.set_result(None)

    # Events of the parser. What they raise would come back wrapped, so they note and abort.

    def on_message_begin(self) -> None:
        """An answer begins: an informational one, the one we wait for, or one that nobody asked."""
        if self.complete:
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which is dropped."""
        if not self.status:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self.complete or self.error is not None:
            return
        status = self._parser.get_status_code()
        if status in _STATUS:
            self._take_head(status)
        elif status == _SWITCHING or not 100 <= status < _FINAL:
            self.fail(UpstreamError(f"illegal status from {self._url}: {status}"))
        else:
            # Informational answers end here: our listener cannot send any.
            self.headers = []

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self.complete or self.error is not None:
            # A body where none may be.
            self._keep = False
            return
        self._pieces.append(data)
        self._unread += len(data)
        if self._unread > _UNREAD_MAX_BYTES:
            self.pause_reading()

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self.status and self.error is None and not self.complete:
            self.complete = True
            self._keep = self._parser.should_keep_alive()

    def _take_head(self, status: int) -> None:
        # The parser takes tokens and visible text alone; a name may still be longer than is legal.
        large = self._head_bytes > NAME_MAX
        if len(self.headers) > _HEADERS_MAX or (large and not legal(self.headers)):
            self.fail(UpstreamError(f"illegal header from {self._url}"))
            return
        version = self._parser.get_http_version()
        if version not in _VERSIONS:
            self.fail(UpstreamError(f"no HTTP/1.1 from {self._url}: HTTP/{version}"))
            return
        framed, coding = _framing(self.headers)
        if coding not in (b"", b"chunked") or (coding and version == "1.0"):
            # A coding's name is for one hop only: the client could not undo it.
            self.fail(UpstreamError(f"unasked transfer coding from {self._url}"))
            return
        self.status = status
        if self._bodyless:
            self.complete = True
            self._keep = self._parser.should_keep_alive()
        self._ends_with_connection = not framed and status not in _BODYLESS

    def _broken(self, message: str) -> None:
        """Note that the answer ends here, in its middle or before its head."""
        self.fail(BrokenResponseError(message) if self.status else UpstreamError(message))

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self.sink is not None:
            self.sink()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _framing(headers: "Headers") -> tuple[bool, bytes]:
    """Say whether the end of the body is announced, and in which transfer coding it comes."""
    framed = False
    coding = b""
    for name, value in headers:
        if len(name) == 17 and name.lower() == b"transfer-encoding":
            # A second one is a list of codings, which none of ours is.
            coding = coding + b"," + value if coding else value.strip().lower()
            framed = True
        elif len(name) == 14 and name.lower() == b"content-length":
            framed = True
    return framed, coding
