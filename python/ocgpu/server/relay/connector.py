"""How a connection to an upstream comes about: name, addresses, TLS, time, keep-alive."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from ocgpu.addresses import from_sockaddr
from ocgpu.server.relay.address import Address
from ocgpu.server.relay.keepalive import keep_alive
from ocgpu.server.relay.upstream import UpstreamConnectError, UpstreamRefusedError

__all__ = ["Connector"]

# A name whose address changes (a container that was made anew) is followed after this.
_NAME_SECONDS: Final = 10.0

_Protocol = TypeVar("_Protocol", bound=asyncio.Protocol)


class _Target(NamedTuple):
    family: socket.AddressFamily
    host: str
    local: bool


class Connector:
    """Opens connections to one upstream. To be made inside a running loop.

    Args:
        address: Where they go.
        timeout: Seconds for a connection to stand.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._tls = ssl.create_default_context() if address.secure else None
        self._targets: list[_Target] = []
        self._resolved = float("-inf")

    async def connect(self, make: Callable[[], _Protocol]) -> tuple[asyncio.Transport, _Protocol]:
        """Open a connection; an upstream on another machine that vanishes is noticed.

        Args:
            make: Makes the connection's protocol.

        Raises:
            UpstreamConnectError: None could be opened.
        """
        url = self._address.url
        try:
            async with asyncio.timeout(self._timeout):
                return await self._connect_any(make, await self._resolve())
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

    async def _connect_any(
        self, make: Callable[[], _Protocol], targets: list[_Target]
    ) -> tuple[asyncio.Transport, _Protocol]:
        """Try each address in turn; an address that says nothing leaves time for the others."""
        failure: OSError | None = None
        share = self._timeout / len(targets)
        for target in targets[:-1]:
            try:
                async with asyncio.timeout(share):
                    return await self._open(make, target)
            except OSError as error:
                failure = failure or error
        try:
            return await self._open(make, targets[-1])
        except OSError as error:
            self._resolved = float("-inf")
            raise failure or error from error

    async def _open(
        self, make: Callable[[], _Protocol], target: _Target
    ) -> tuple[asyncio.Transport, _Protocol]:
        options: dict[str, Any] = {"family": target.family}
        if self._tls is not None:
            options |= {"ssl": self._tls, "server_hostname": self._address.host}
        transport, protocol = await self._loop.create_connection(
            make, target.host, self._address.port, **options
        )
        if not target.local:
            # An engine on this machine cannot vanish without a word.
            keep_alive(transport.get_extra_info("socket"))
        return transport, protocol

    async def _resolve(self) -> list[_Target]:
        """Give the addresses of the upstream's name, at most `_NAME_SECONDS` old."""
        now = self._loop.time()
        if self._targets and now - self._resolved < _NAME_SECONDS:
            return self._targets
        found = await self._loop.getaddrinfo(
            self._address.host, self._address.port, type=socket.SOCK_STREAM
        )
        addresses = [(family, from_sockaddr(place)) for family, *_, place in found]
        self._targets = [_Target(kind, str(one), one.is_loopback) for kind, one in addresses]
        self._resolved = now
        return self._targets
