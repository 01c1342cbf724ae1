"""Connections to one upstream: kept while idle, and closed when they are old."""

import asyncio
from typing import Final

from ocgpu.server.relay.address import Address
from ocgpu.server.relay.connection import Connection
from ocgpu.server.relay.connector import Connector

__all__ = ["Pool"]

# Shorter than any upstream's own limit that we know (75 s in aiohttp, none in Go).
_IDLE_SECONDS: Final = 30.0
_IDLE_MAX: Final = 128
# Connections that were opened for one request each: a few for others, or a day of chats piles up.
_KEPT_FRESH: Final = 8


class Pool:
    """Gives connections and takes them back. To be made inside a running loop.

    Args:
        address: Where they go.
        connect_timeout: Seconds for a connection to stand.
    """

    def __init__(self, address: Address, connect_timeout: float) -> None:
        self._url = address.url
        self._connector = Connector(address, connect_timeout)
        self._loop = asyncio.get_running_loop()
        # In the order of their return, with the time of it.
        self._idle: dict[Connection, float] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def idle(self) -> int:
        """How many connections wait for use."""
        return len(self._idle)

    async def take(self, *, fresh: bool) -> Connection:
        """Give a connection, the one that was used last if there is one.

        Args:
            fresh: Open one in any case.

        Raises:
            UpstreamConnectError: None could be opened.
        """
        if not fresh and self._idle:
            connection, _ = self._idle.popitem()
            return connection
        _, connection = await self._connector.connect(self._made)
        connection.fresh = fresh
        return connection

    def put(self, connection: Connection) -> None:
        """Take a connection back whose exchange has ended and left it usable."""
        limit = _KEPT_FRESH if connection.fresh else _IDLE_MAX
        if self._closed or len(self._idle) >= limit:
            connection.abort()
            return
        self._idle[connection] = self._loop.time()
        if self._sweep is None:
            self._sweep = self._loop.call_later(_IDLE_SECONDS, self._close_old)

    def close(self) -> None:
        """Close what is idle, and what comes back later."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._idle):
            connection.abort()
        self._idle.clear()

    def _made(self) -> Connection:
        return Connection(self._url, self._gone)

    def _gone(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def _close_old(self) -> None:
        self._sweep = None
        limit = self._loop.time() - _IDLE_SECONDS
        for connection, since in list(self._idle.items()):
            if since > limit:
                # A hundredth more, so that the timer's granularity does not make it run twice.
                delay = since - limit + 0.01
                self._sweep = self._loop.call_later(delay, self._close_old)
                break
            del self._idle[connection]
            connection.abort()
