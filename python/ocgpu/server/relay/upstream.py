"""What an upstream gives, and how it can fail.

The client behind it must not: follow redirects, keep cookies, decompress, read proxies from the
environment, limit connections, or end a request by a time-out of its own after the connection
stands. Generations take minutes, and a hidden limit shows as an error of the engine.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from ocgpu.server.relay.asgi import Headers

__all__ = [
    "BrokenResponseError",
    "Upstream",
    "UpstreamConnectError",
    "UpstreamError",
    "UpstreamRefusedError",
    "UpstreamResponse",
]


class UpstreamError(Exception):
    """The upstream gave no usable answer; the client gets a 502."""


class UpstreamConnectError(UpstreamError):
    """No connection to the upstream came about; it never saw the request."""


class UpstreamRefusedError(UpstreamConnectError):
    """Nothing listens at the upstream's address: the engine is not running."""


class BrokenResponseError(UpstreamError):
    """The upstream broke off in the middle of its answer; the client must see that it did."""


class UpstreamResponse(Protocol):
    """An answer whose head has arrived.

    Attributes:
        status: 200 to 599. Anything else kills Granian's process and is refused before.
        headers: As the upstream sent them, order, case and repetitions kept.
    """

    status: int
    headers: Headers

    async def read(self) -> bytes:
        """Wait for the next piece of the body; b"" is the end.

        Raises:
            BrokenResponseError: The upstream broke off.
        """


class Upstream(Protocol):
    """One engine's HTTP server.

    Attributes:
        url: Scheme, host, port and path prefix, no login, no trailing slash.
        authority: Host and port as they stand in a `Host` header.
    """

    url: str
    authority: bytes

    def request(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
        *,
        fresh: bool,
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Send a request; leaving the context before the end of the body aborts it.

        Args:
            method: The method.
            target: Path and query, byte for byte.
            headers: What to send, `Host` included; a whole body's length is set by the client.
            body: Whole, in pieces, or None for a request without one.
            fresh: On a connection of its own, never tried again. For what must not run twice: a
                pooled connection may be closed by the upstream in the moment it is used.

        Raises:
            UpstreamError: On entering, when no head of an answer arrives.
        """

    async def close(self) -> None:
        """Close all connections."""
