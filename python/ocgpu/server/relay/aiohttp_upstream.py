"""The upstream interface on aiohttp: correct, with all its limits off.

Known limits: header bytes that are not UTF-8 get lost, and it costs twice the CPU of a connection
on a bare protocol.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from ocgpu.server.relay.asgi import Headers
from ocgpu.server.relay.headers import legal
from ocgpu.server.relay.upstream import (
    BrokenResponseError,
    UpstreamConnectError,
    UpstreamError,
    UpstreamRefusedError,
)

__all__ = ["AiohttpUpstream", "open_session", "text_headers"]

_HEADER_LIMIT: Final = 2**20
_AUTOMATIC: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
# Status codes that Granian can send without ending the process.
_LEGAL_STATUS: Final = range(200, 600)


def open_session(connect_timeout: float, *, fresh: bool) -> aiohttp.ClientSession:
    """Open a client session whose limits are off.

    Args:
        connect_timeout: Seconds for a connection to stand.
        fresh: Every request gets a connection of its own.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=fresh, ttl_dns_cache=10),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout),
        skip_auto_headers=_AUTOMATIC,
        trust_env=False,
        read_bufsize=2**18,
        max_line_size=_HEADER_LIMIT,
        max_field_size=_HEADER_LIMIT,
        max_headers=10_000,
    )


class AiohttpUpstream:
    """One engine's HTTP server, reached through aiohttp. To be made inside a running loop.

    Args:
        url: Scheme, host and port.
        connect_timeout: Seconds for a connection to stand.
    """

    def __init__(self, url: str, connect_timeout: float) -> None:
        self.url = url.rstrip("/")
        self.authority = urlsplit(self.url).netloc.encode("idna" if not url.isascii() else "ascii")
        self._pooled = open_session(connect_timeout, fresh=False)
        self._fresh = open_session(connect_timeout, fresh=True)

    @asynccontextmanager
    async def request(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
        *,
        fresh: bool,
    ) -> AsyncIterator["AiohttpResponse"]:
        """Send a request; see `Upstream.request`."""
        session = self._fresh if fresh else self._pooled
        if isinstance(body, bytes):
            headers = [h for h in headers if h[0] != b"content-length"]
        try:
            response = await session.request(
                method,
                URL(self.url + target.decode("latin-1"), encoded=True),
                data=body,
                headers=text_headers(headers),
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _connect_error(self.url, error) from error
        try:
            if response.status not in _LEGAL_STATUS:
                raise UpstreamError(f"illegal status from {self.url}: {response.status}")
            if not legal(list(response.raw_headers)):
                raise UpstreamError(f"illegal header from {self.url}")
            yield AiohttpResponse(response)
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._pooled.close()
        await self._fresh.close()


class AiohttpResponse:
    """An answer of aiohttp; see `UpstreamResponse`."""

    __slots__ = ("_content", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers: Headers = list(response.raw_headers)
        self._content = response.content

    def ready(self) -> bytes | None:
        """Give what has arrived without waiting; see `UpstreamResponse.ready`."""
        if self._content.exception() is not None:
            return b""
        if self._content.at_eof():
            return None
        return self._content.read_nowait()

    async def read(self) -> bytes:
        """Wait for the next piece; see `UpstreamResponse.read`."""
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenResponseError(str(error)) from error


def text_headers(headers: Headers) -> "CIMultiDict[str]":
    """Give header bytes as the text that aiohttp takes, order and repetitions kept."""
    out: CIMultiDict[str] = CIMultiDict()
    for name, value in headers:
        out.add(name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))
    return out


def _connect_error(url: str, error: Exception) -> UpstreamError:
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(
        error.os_error, ConnectionRefusedError
    ):
        return UpstreamRefusedError(f"nothing listens at {url}; start it or correct its URL")
    if isinstance(error, aiohttp.ConnectionTimeoutError | asyncio.TimeoutError):
        return UpstreamConnectError(f"no connection to {url}: it did not answer in time")
    if isinstance(error, aiohttp.ClientConnectorError):
        return UpstreamConnectError(f"no connection to {url}: {error.os_error.strerror}")
    # The text of a parser's error quotes what the upstream sent, which is private.
    return UpstreamError(f"no answer from {url}: {type(error).__name__}")
