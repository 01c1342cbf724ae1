"""The sockets that we listen on: bound by us, or inherited from systemd.

Bound without SO_REUSEPORT: with it a second instance would share the port in silence, and there
would be two locks for one card.
"""

import errno
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Final

from ocgpu.contradictions import is_loopback, points_at
from ocgpu.forms import Listen
from ocgpu.server.relay.keepalive import keep_alive
from ocgpu.server.systemd import Inherited
from ocgpu.settings import Settings

__all__ = ["BACKLOG", "ListenError", "Sockets", "address_of", "bind", "open_sockets", "url_of"]

BACKLOG: Final = 4096

Sockets = list[tuple[str, socket.socket]]

logger: Final = logging.getLogger("ocgpu.server")

# What a kernel without IPv6 says, or one where it is switched off.
_NO_IPV6: Final = frozenset((errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL))
_VARIABLES: Final = {"ollama": "LISTEN_OLLAMA", "comfy": "LISTEN_COMFY", "admin": "LISTEN_ADMIN"}
_REMEDIES: Final = {
    errno.EADDRINUSE: "stop what listens there or set `{}`",
    errno.EACCES: "let systemd bind it (`ListenStream=`), or set `{}` to a port from 1024 on",
    errno.EADDRNOTAVAIL: "set `{}` to an address of this machine",
}


class ListenError(Exception):
    """A listener cannot start; the message says which, why, and what to do."""


def open_sockets(settings: Settings, inherited: Sequence[Inherited] = ()) -> Sockets:
    """Bind all listeners that are on, apart from those that were inherited.

    Returns:
        Pairs of `ollama`, `comfy` or `admin` and a socket that listens.

    Raises:
        ListenError: One cannot start; all others are closed again.
    """
    wanted = _wanted(settings)
    sockets: Sockets = []
    try:
        for given in inherited:
            sockets.append((_place(given, wanted), given.socket))
            _check(settings, *sockets[-1])
            _tune(given.socket)
        have = {name for name, _ in sockets}
        for name, listen in wanted.items():
            if name not in have:
                sockets.append((name, _bound(name, listen)))
    except BaseException:
        for owned in (*(given.socket for given in inherited), *(one for _, one in sockets)):
            owned.close()
        raise
    order = list(_VARIABLES)
    return sorted(sockets, key=lambda pair: order.index(pair[0]))


def bind(host: str, port: int) -> socket.socket:
    """Bind and listen; a port that is taken fails here, before anything has started.

    Args:
        host: IP literal; `::` takes IPv4 as well.
        port: 0 lets the kernel choose.

    Raises:
        OSError: The address is taken or not ours.
    """
    try:
        return _bind(host, port)
    except OSError as error:
        if host != "::" or error.errno not in _NO_IPV6:
            raise
    return _bind("0.0.0.0", port)  # noqa: S104  # asked for: all interfaces


def address_of(listener: socket.socket) -> Listen:
    """Give the address that a socket is bound to."""
    host, port = listener.getsockname()[:2]
    return Listen(host=host, port=port)


def url_of(listener: socket.socket) -> str:
    """Give a URL at which this machine reaches a bound socket."""
    host, port = listener.getsockname()[:2]
    if host in ("::", "0.0.0.0"):  # noqa: S104  # compared, not bound
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _wanted(settings: Settings) -> dict[str, Listen]:
    listeners = {
        "ollama": settings.listen_ollama if settings.ollama_url else None,
        "comfy": settings.listen_comfy if settings.comfy_url else None,
        "admin": settings.listen_admin,
    }
    return {name: listen for name, listen in listeners.items() if listen is not None}


def _bound(name: str, listen: Listen) -> socket.socket:
    try:
        return bind(listen.host, listen.port)
    except OSError as error:
        number = error.errno or 0
        remedy = _REMEDIES.get(number, "set `{}`").format(_VARIABLES[name])
        reason = os.strerror(number).lower()
        raise ListenError(f"cannot listen on {listen}: {reason}; {remedy}") from error


def _place(given: Inherited, wanted: dict[str, Listen]) -> str:
    """Give the listener that an inherited socket is for: by its name, or else by its port."""
    if given.name in wanted:
        return given.name
    port = address_of(given.socket).port
    for name, listen in wanted.items():
        if given.name not in _VARIABLES and listen.port == port:
            return name
    raise ListenError(
        f"no listener for the inherited socket {given}; name it `ollama`, `comfy` or `admin`"
        " (`FileDescriptorName=`), and turn that listener on"
    )


def _check(settings: Settings, name: str, listener: socket.socket) -> None:
    """Hold an inherited address to what holds for one of the settings."""
    address = address_of(listener)
    if name == "admin" and not settings.admin_token and not is_loopback(address.host):
        raise ListenError(f"cannot listen on {address}: not on loopback; set `ADMIN_TOKEN`")
    upstreams = {"OLLAMA_URL": settings.ollama_url, "COMFY_URL": settings.comfy_url}
    for variable, url in upstreams.items():
        if url and points_at(url, address):
            raise ListenError(
                f"cannot listen on {address}: `{variable}` points there; use the engine's address"
            )


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":
            # On Windows this option means what SO_REUSEPORT means elsewhere.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        _tune(listener)
    except BaseException:
        listener.close()
        raise
    return listener


def _tune(listener: socket.socket) -> None:
    """Listen; what is set here, accepted connections inherit."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(listener)
    listener.listen(BACKLOG)
    listener.settimeout(0)
