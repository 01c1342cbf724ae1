"""Settings that are legal one by one and wrong together."""

import ipaddress
import itertools
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from ocgpu.addresses import Address, is_own, resolve
from ocgpu.forms import Listen

__all__ = ["Contradiction", "contradictions", "is_loopback", "points_at"]

_EVERYWHERE: Final = {"::", "0.0.0.0"}  # noqa: S104  # compared, not bound
_PORTS: Final = {"http": 80, "https": 443}

# The unspecified address stands for this machine when it is connected to.
_LOCAL: Final[dict[int, Address]] = {
    4: ipaddress.IPv4Address("127.0.0.1"),
    6: ipaddress.IPv6Address("::1"),
}


class Contradiction(NamedTuple):
    """The setting to change, its text, and what to use in its place."""

    name: str
    text: str
    advice: str


def contradictions(
    listeners: Mapping[str, Listen | None], upstreams: Mapping[str, str], admin_token: str
) -> Iterator[Contradiction]:
    """Find what contradicts itself.

    Args:
        listeners: By name of their setting; None is off.
        upstreams: Their URLs by name of their setting; "" is none.
        admin_token: Token of the control plane; "" is none.
    """
    admin = listeners["LISTEN_ADMIN"]
    if admin and not admin_token and not is_loopback(admin.host):
        advice = "a token, or a loopback address for `LISTEN_ADMIN`"
        yield Contradiction("ADMIN_TOKEN", "", advice)
    if listeners["LISTEN_OLLAMA"] is None and listeners["LISTEN_COMFY"] is None:
        advice = "at least one upstream and listener"
        yield Contradiction("OLLAMA_URL", upstreams["OLLAMA_URL"], advice)
    for (name, one), (other_name, other) in itertools.combinations(listeners.items(), 2):
        if one and other and one.port == other.port != 0 and _meet(one.host, other.host):
            advice = f"another port than that of `{name}`"
            yield Contradiction(other_name, str(other), advice)
    for (name, url), listener in itertools.product(upstreams.items(), listeners.values()):
        if listener and url and points_at(url, listener):
            yield Contradiction(name, url, "the engine's address, not one of our own")


def is_loopback(host: str) -> bool:
    """Whether an address of a listener is reached from this machine alone."""
    return _plain(ipaddress.ip_address(host)).is_loopback


def points_at(url: str, listener: Listen) -> bool:
    """Whether the proxy would be its own upstream, and a request would go round for ever."""
    parts = urlsplit(url)
    port = parts.port or _PORTS[parts.scheme]
    if port != listener.port:
        return False
    return any(_takes(listener, _reached(address)) for address in resolve(parts.hostname or ""))


def _meet(one: str, other: str) -> bool:
    return one == other or bool({one, other} & _EVERYWHERE)


def _takes(listener: Listen, address: Address) -> bool:
    """Whether a connection to `address` comes to a listener of that port."""
    if listener.host in _EVERYWHERE:
        reached = listener.host == "::" or address.version == 4
        return reached and is_own(address)
    return address == _plain(ipaddress.ip_address(listener.host))


def _reached(address: Address) -> Address:
    plain = _plain(address)
    return _LOCAL[plain.version] if plain.is_unspecified else plain


def _plain(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
