"""Networks of trusted peers: how their setting is read and written."""

import ipaddress
from typing import Final

__all__ = ["NETWORKS_FORM", "PRIVATE", "Network", "format_networks", "networks"]

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

NETWORKS_FORM: Final = (
    "addresses and networks such as `10.0.0.5,192.168.0.0/16`, a comma between them,"
    " or `private`, `none` or `all`"
)
# Loopback, RFC 1918, link-local (RFC 3927, RFC 4291) and unique local addresses (RFC 4193).
PRIVATE: Final[tuple[Network, ...]] = (
    ipaddress.IPv4Network("127.0.0.0/8"),
    ipaddress.IPv4Network("10.0.0.0/8"),
    ipaddress.IPv4Network("172.16.0.0/12"),
    ipaddress.IPv4Network("192.168.0.0/16"),
    ipaddress.IPv4Network("169.254.0.0/16"),
    ipaddress.IPv6Network("::1/128"),
    ipaddress.IPv6Network("fe80::/10"),
    ipaddress.IPv6Network("fc00::/7"),
)
_ALL: Final[tuple[Network, ...]] = (
    ipaddress.IPv4Network("0.0.0.0/0"),
    ipaddress.IPv6Network("::/0"),
)
_MAPPED: Final = ipaddress.IPv6Network("::ffff:0:0/96")
_WORDS: Final = {"private": PRIVATE, "none": (), "all": _ALL}


def networks(text: str) -> tuple[Network, ...]:
    """Read addresses and networks; `private` may stand beside others, `none` and `all` alone."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    found: list[Network] = []
    for part in (part.strip() for part in text.split(",")):
        found += PRIVATE if part.lower() == "private" else [_network(part)]
    private = PRIVATE if set(PRIVATE) <= set(found) else ()
    return tuple(dict.fromkeys((*private, *found)))


def _network(text: str) -> Network:
    network = ipaddress.ip_network(text)
    # No peer has such an address: a mapped one is looked up as IPv4, and a zone is no part of it.
    if "%" in text or (network.version == 6 and network.subnet_of(_MAPPED)):
        raise ValueError(text)
    return network


def format_networks(value: tuple[Network, ...]) -> str:
    """Write networks as `networks` reads them."""
    for word, meant in _WORDS.items():
        if value == meant:
            return word
    if value[: len(PRIVATE)] == PRIVATE:
        return ",".join(["private", *map(str, value[len(PRIVATE) :])])
    return ",".join(map(str, value))
