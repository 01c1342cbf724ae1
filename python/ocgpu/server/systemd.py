"""What systemd passes in and wants to hear: sockets that it bound, and how far we are.

The protocols of sd_listen_fds(3) and sd_notify(3), without libsystemd.
"""

import logging
import os
import socket
import stat
from collections.abc import MutableMapping
from typing import Final, NamedTuple

__all__ = ["InheritError", "Inherited", "Notifier", "inherited_sockets"]

logger: Final = logging.getLogger("ocgpu.server")

_FIRST_DESCRIPTOR: Final = 3
_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")
_REMEDY: Final = "give it with `ListenStream=` and `Accept=no`"


class InheritError(Exception):
    """A passed descriptor is not what a listener can use."""


class Inherited(NamedTuple):
    """A socket that systemd has bound.

    Attributes:
        name: Its `FileDescriptorName=`; without one, systemd says the unit's name.
        socket: It listens for TCP.
    """

    name: str
    socket: socket.socket

    def __str__(self) -> str:
        host, port = self.socket.getsockname()[:2]
        return f"`{self.name}` (port {port} on {host})"


def inherited_sockets(environ: MutableMapping[str, str]) -> list[Inherited]:
    """Take the sockets that were passed to this process; the variables are gone afterwards.

    Raises:
        InheritError: A descriptor is not a listening TCP socket, or the variables make no sense.
    """
    pid, count, names, _ = (environ.pop(name, "") for name in _VARIABLES)
    if not pid and not count:
        return []
    if not (pid.isascii() and pid.isdigit() and count.isascii() and count.isdigit()):
        raise InheritError(f"invalid `LISTEN_FDS`: {count!r} for process {pid!r}; use two numbers")
    if int(pid) != os.getpid():
        # They were meant for a parent: `sh -c` without `exec` in a unit looks like this.
        logger.warning("`LISTEN_FDS` is for process %s, not for us: not taken", pid)
        return []
    labels = names.split(":") if names else []
    taken: list[Inherited] = []
    try:
        for place in range(int(count)):
            name = labels[place] if place < len(labels) else "unknown"
            taken.append(Inherited(name, _listening(_FIRST_DESCRIPTOR + place, name)))
    except InheritError:
        for one in taken:
            one.socket.close()
        raise
    return taken


def _listening(descriptor: int, name: str) -> socket.socket:
    """Take a descriptor as a listening TCP socket that no child inherits."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise _refusal(descriptor, name, "no socket")
    except OSError:
        raise _refusal(descriptor, name, "not open") from None
    taken = socket.socket(fileno=descriptor)
    wrong = _wrong(taken)
    if wrong:
        taken.close()
        raise _refusal(descriptor, name, wrong)
    taken.set_inheritable(False)
    return taken


def _wrong(taken: socket.socket) -> str:
    """Say why a socket is no listener of ours; "" if it is one."""
    internet = taken.family in (socket.AF_INET, socket.AF_INET6)
    if not internet or taken.type != socket.SOCK_STREAM:
        return "not for TCP"
    if not taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return "not listening"
    if hasattr(socket, "SO_REUSEPORT") and taken.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT):
        return "shared by `ReusePort=`, so that a second instance would have a lock of its own"
    return ""


def _refusal(descriptor: int, name: str, reason: str) -> InheritError:
    return InheritError(f"inherited descriptor {descriptor} (`{name}`): {reason}; {_REMEDY}")


class Notifier:
    """Tells the service manager how far we are; without one it does nothing.

    Args:
        environ: Its `NOTIFY_SOCKET` is taken out: it is for this process alone.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")

    def ready(self) -> None:
        """Say that connections are accepted."""
        self._tell("READY=1\nSTATUS=serving")

    def stopping(self, seconds: float) -> None:
        """Say that we are draining, and for how long at most."""
        limit = int(seconds * 1e6)
        self._tell(f"STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC={limit}")

    def _tell(self, text: str) -> None:
        if not self._address:
            return
        address = self._address
        # `@` stands for the zero byte of an abstract name.
        name = f"\0{address[1:]}" if address.startswith("@") else address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(1.0)
                sender.sendto(text.encode(), name)
        except (OSError, ValueError) as error:
            # A service that serves is worth more than one that is told about.
            logger.warning("cannot tell the service manager: %s", error)
