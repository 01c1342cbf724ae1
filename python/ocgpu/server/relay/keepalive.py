"""TCP keep-alive: the kernel notices a peer that vanished without a word."""

import contextlib
import socket
from typing import Any, Final

__all__ = ["keep_alive"]

# Seconds, seconds and a number: a peer is given up after 15 + 3 * 5 seconds of silence.
_OPTIONS: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


def keep_alive(
    connection: Any,  # noqa: ANN401  # uvloop's socket is no socket.socket
    unacknowledged: int | None = None,
) -> None:
    """Have the kernel probe the peer; connections that a listener accepts inherit it.

    Args:
        connection: A socket of TCP.
        unacknowledged: Milliseconds that what was sent may stay so; None leaves it to the kernel.
            Keep-alive is silent while something is under way.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = list(_OPTIONS)
    if unacknowledged is not None:
        options.append(("TCP_USER_TIMEOUT", unacknowledged))
    for name, value in options:
        if hasattr(socket, name):
            # Other kernels know fewer of them than Python has names for.
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
