"""Connections to one upstream: opened, kept while idle, and closed when they are old."""

import asyncio
import ipaddress
import socket
import ssl
from typing import Any, Final, NamedTuple

from ocgpu.server.relay.address import Address
from ocgpu.server.relay.connection import Connection
from ocgpu.server.relay.upstream import UpstreamConnectError, UpstreamRefusedError

__all__ = ["Pool"]

# Shorter than any upstream's own limit that we know (75 s in aiohttp, none in Go).
_IDLE_SECONDS: Final = 30.0
_IDLE_MAX: Final = 128
# Connections that were opened for one request each: a few for others, or a day of chats piles up.
_KEPT_FRESH: Final = 8
# A name whose address changes (a container that was made anew) is followed after this.
_NAME_SECONDS: Final = 10.0
# An upstream that vanished without a word is noticed after 15 + 3 * 5 seconds.
_KEEPALIVE: Final = tuple(
    (getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
)


class _Target(NamedTuple):
    family: socket.AddressFamily
    host: str
    port: int
    local: bool


class Pool:
    """Gives connections and takes them back. To be made inside a running loop.

    Args:
        address: Where they go.
        connect_timeout: Seconds for a connection to stand.
    """

    def __init__(self, address: Address, connect_timeout: float) -> None:
        self._address = address
        self._connect_timeout = connect_timeout
        self._loop = asyncio.get_running_loop()
        self._tls = ssl.create_default_context() if address.secure else None
        # In the order of their return, with the time of it.
        self._idle: dict[Connection, float] = {}
        self._targets: list[_Target] = []
        self._resolved = float("-inf")
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
        connection = await self._connect()
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

    async def _connect(self) -> Connection:
        url = self._address.url
        try:
            async with asyncio.timeout(self._connect_timeout):
                return await self._connect_any(await self._resolve())
        except TimeoutError:
            raise UpstreamConnectError(
                f"no connection to {url}: it did not answer in time"
            ) from None
        except ConnectionRefusedError as error:
            message = f"nothing listens at {url}; start it or correct its URL"
            raise UpstreamRefusedError(message) from error
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            raise UpstreamConnectError(f"no TLS with {url}: {reason}") from error
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UpstreamConnectError(f"no connection to {url}: {reason}") from error

    async def _connect_any(self, targets: list[_Target]) -> Connection:
        """Try each address in turn; an address that says nothing leaves time for the others."""
        failure: OSError | None = None
        share = self._connect_timeout / len(targets)
        for target in targets[:-1]:
            try:
                async with asyncio.timeout(share):
                    return await self._open(target)
            except OSError as error:
                failure = failure or error
        try:
            return await self._open(targets[-1])
        except OSError as error:
            self._resolved = float("-inf")
            raise failure or error from error

    async def _open(self, target: _Target) -> Connection:
        options: dict[str, Any] = {"family": target.family}
        if self._tls is not None:
            options |= {"ssl": self._tls, "server_hostname": self._address.host}
        transport, connection = await self._loop.create_connection(
            lambda: Connection(self._address.url, self._gone), target.host, target.port, **options
        )
        if not target.local:
            # An engine on this machine cannot vanish without a word.
            _keep_alive(transport.get_extra_info("socket"))
        return connection

    async def _resolve(self) -> list[_Target]:
        """Give the addresses of the upstream's name, at most `_NAME_SECONDS` old."""
        now = self._loop.time()
        if self._targets and now - self._resolved < _NAME_SECONDS:
            return self._targets
        found = await self._loop.getaddrinfo(
            self._address.host, self._address.port, type=socket.SOCK_STREAM
        )
        self._targets = [
            _target(family, str(place[0]), int(place[1])) for family, *_, place in found
        ]
        self._resolved = now
        return self._targets


def _target(family: socket.AddressFamily, host: str, port: int) -> _Target:
    return _Target(family, host, port, ipaddress.ip_address(host.partition("%")[0]).is_loopback)


def _keep_alive(connected: Any) -> None:  # noqa: ANN401  # uvloop's socket is no socket.socket
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
