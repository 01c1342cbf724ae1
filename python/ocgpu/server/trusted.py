"""Peers whose `X-Forwarded-*` is believed: a proxy in front of us, and nobody else."""

import ipaddress
from functools import lru_cache
from typing import Final

from ocgpu.networks import Network

__all__ = ["TrustedProxies"]

# Front proxies are few; the bound keeps a crowd of clients from growing it.
_CACHE: Final = 1024


class TrustedProxies:
    """The peers in some networks: `"10.0.0.5" in trusted`.

    Args:
        networks: Where a peer must be.
    """

    def __init__(self, networks: tuple[Network, ...]) -> None:
        self._networks = networks
        self._look = lru_cache(_CACHE)(self._find)

    def __contains__(self, address: object) -> bool:
        """Whether a peer is trusted, by its address as text; what is no address is not."""
        return isinstance(address, str) and self._look(address)

    def _find(self, address: str) -> bool:
        try:
            peer = ipaddress.ip_address(address)
        except ValueError:
            return False
        # An IPv4 peer of a socket that takes both shows as `::ffff:10.0.0.5`.
        mapped = peer.ipv4_mapped if peer.version == 6 else None
        return any((mapped or peer) in network for network in self._networks)
