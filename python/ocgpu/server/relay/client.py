"""The HTTP client of the byte path: requests to one upstream, as the wire has them.

Idempotent requests go out on pooled connections and are sent once more, on a fresh one, when the
upstream closed the pooled one in that moment without a byte of an answer. All others go out on a
connection of their own and are never sent twice (RFC 9110 section 9.2.2).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from ocgpu.server.relay.address import Address
from ocgpu.server.relay.asgi import ClientGoneError, Headers, header
from ocgpu.server.relay.connection import Connection
from ocgpu.server.relay.pool import Pool
from ocgpu.server.relay.upstream import UpstreamConnectError, UpstreamError

__all__ = ["HttpUpstream", "repeatable"]

# RFC 9110 section 9.2.2.
_REPEATABLE: Final = frozenset(("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"))
_CHUNKED: Final = (b"transfer-encoding", b"chunked")
_LAST_CHUNK: Final = b"0\r\n\r\n"


def repeatable(method: str, body: bytes | AsyncIterator[bytes] | None) -> bool:
    """Whether a request may be sent twice: what is streamed is here once."""
    return method in _REPEATABLE and (body is None or isinstance(body, bytes))


class HttpUpstream:
    """One engine's HTTP server. To be made inside a running loop.

    Args:
        url: As in the settings: scheme, login, host, port and path prefix.
        connect_timeout: Seconds for a connection to stand.
    """

    def __init__(self, url: str, connect_timeout: float) -> None:
        self.address = Address.parse(url)
        self.url = self.address.url
        self.authority = self.address.authority
        self._prefix = self.address.prefix
        self._authorization = self.address.authorization
        self._pool = Pool(self.address, connect_timeout)
        # Told when no connection came about, so that whoever watches the engine looks again.
        self.on_unreachable: Callable[[], None] = _nothing
        self._uploads: dict[Connection, asyncio.Task[None]] = {}

    async def open(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
        *,
        fresh: bool,
    ) -> Connection:
        """Send a request and wait for the head of its answer; `release` ends the exchange.

        See `Upstream.request`.

        Raises:
            ClientGoneError: `body` ended with it.
        """
        whole, pieces = (body, None) if body is None or isinstance(body, bytes) else (None, body)
        chunked = pieces is not None and header(headers, b"content-length") is None
        if chunked:
            headers = [*headers, _CHUNKED]
        message = self._message(method, target, headers, whole)
        while True:
            try:
                connection = await self._pool.take(fresh=fresh)
            except UpstreamConnectError:
                self.on_unreachable()
                raise
            try:
                connection.begin(message, bodyless=method == "HEAD", whole=pieces is None)
                if pieces is not None:
                    self._upload(connection, pieces, chunked=chunked)
                await connection.head()
            except UpstreamError:
                self.release(connection)
                again = repeatable(method, body) and connection.reused
                if not again or connection.answered:
                    raise
                fresh = True
            except BaseException:
                self.release(connection)
                raise
            else:
                return connection

    def release(self, connection: Connection) -> None:
        """End an exchange; an answer that was not read to its end is aborted."""
        upload = self._uploads.pop(connection, None) if self._uploads else None
        if upload is not None:
            upload.cancel()
        if connection.finish():
            self._pool.put(connection)

    @asynccontextmanager
    async def request(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
        *,
        fresh: bool,
    ) -> AsyncIterator[Connection]:
        """Send a request; see `Upstream.request`."""
        connection = await self.open(method, target, headers, body, fresh=fresh)
        try:
            yield connection
        finally:
            self.release(connection)

    async def close(self) -> None:
        """Close all idle connections, and those in use as soon as they are released."""
        self._pool.close()
        # An aborted transport gives its socket back in the loop's next turn.
        await asyncio.sleep(0)

    def _message(self, method: str, target: bytes, headers: Headers, body: bytes | None) -> bytes:
        """Write the head, and behind it the body when it is whole."""
        # `OPTIONS *` asks about the server and not about a path of it.
        path = target if target == b"*" else self._prefix + target
        lines = [b"%b %b HTTP/1.1" % (method.encode("latin-1"), path)]
        if self._authorization is not None:
            headers = [h for h in headers if h[0] != b"authorization"]
            headers.append((b"authorization", self._authorization))
        if body is not None:
            headers = [h for h in headers if h[0] != b"content-length"]
            headers.append((b"content-length", b"%d" % len(body)))
        lines += [b"%b: %b" % pair for pair in headers]
        lines.append(b"\r\n" + body if body else b"\r\n")
        return b"\r\n".join(lines)

    def _upload(
        self, connection: Connection, pieces: AsyncIterator[bytes], *, chunked: bool
    ) -> None:
        task = asyncio.ensure_future(_send_pieces(connection, pieces, chunked=chunked))
        self._uploads[connection] = task
        task.add_done_callback(lambda done: _uploaded(connection, done))


def _nothing() -> None:
    """Nobody is told."""


async def _send_pieces(
    connection: Connection, pieces: AsyncIterator[bytes], *, chunked: bool
) -> None:
    async for piece in pieces:
        await connection.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
    connection.end_request(_LAST_CHUNK if chunked else b"")


def _uploaded(connection: Connection, done: "asyncio.Task[None]") -> None:
    """End the exchange when the request's body broke off; the answer can be early, but not late."""
    if not done.cancelled() and (error := done.exception()) is not None:
        connection.fail(error if isinstance(error, Exception) else ClientGoneError())
