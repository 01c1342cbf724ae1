"""IP addresses: what a name stands for, and which are this machine's."""

import ipaddress
import socket

__all__ = ["Address", "from_sockaddr", "is_local", "is_own", "resolve"]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def from_sockaddr(place: tuple[object, ...]) -> Address:
    """Give the address in a socket address as `getaddrinfo` gives them, its zone included."""
    text = str(place[0]).partition("%")[0]
    zone = place[3] if len(place) > 3 else 0
    return ipaddress.ip_address(f"{text}%{zone}" if zone else text)


def resolve(host: str) -> list[Address]:
    """Give the addresses that a connection would go to; none while the name is unknown.

    It blocks for as long as the resolver likes.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [from_sockaddr(entry[4]) for entry in found]


def is_own(address: Address) -> bool:
    """Whether this machine has the address: loopback, or one that a socket of ours may have."""
    if address.is_loopback:
        return True
    try:
        # `bind` itself takes no zone from a text, and a link-local address is none without one.
        family, *_, place = socket.getaddrinfo(str(address), 0, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def is_local(host: str) -> bool:
    """Whether a host is this machine, by whichever of its addresses; blocks as `resolve` does."""
    addresses = resolve(host)
    return bool(addresses) and all(map(is_own, addresses))
