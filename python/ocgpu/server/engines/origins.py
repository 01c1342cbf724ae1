"""Whether a Host is a name of this machine, or one that somebody else may have pointed at it.

A page of `http://evil.example` whose name resolves to this machine sends Host and Origin of that
one name. Equal names are therefore no proof of a page of ours: the name must be known as well.
"""

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

__all__ = ["KnownHosts"]

# No public name server answers for these, so no page from elsewhere can have such an origin:
# RFC 6761, RFC 6762, and `.internal`, which ICANN has set aside.
_LOCAL_SUFFIXES: Final = (".localhost", ".local", ".internal")


class KnownHosts:
    """Tells a Host that is ours.

    Args:
        names: More names, without port, in any case.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        own = socket.gethostname()
        self._names = frozenset(name.lower().rstrip(".") for name in ("localhost", own, *names))

    def __contains__(self, host: bytes) -> bool:
        """Whether a `Host`, with or without a port, is an IP address or one of our names."""
        name = _without_port(host.decode("latin-1")).lower().rstrip(".")
        if name in self._names or name.endswith(_LOCAL_SUFFIXES):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
