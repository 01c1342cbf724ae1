"""Notice clients that left behind a request of theirs that nobody has read yet.

While a request is served, the listener's HTTP library stops reading at the first byte behind it: a
pipelined request or a stray line end. From then on it sees neither FIN nor RST, and a waiter would
keep its place for as long as it may wait. The kernel knows: on Linux its table of sockets is asked
once a second (sock_diag(7)) for the connections of our ports, while a request is older than that.
On other platforms nobody is noticed here.

The table rather than /proc/net/tcp: the kernel picks the port's rows, in binary; and rather than
one question for each waiter, because a listener on all interfaces does not say at which address a
client reached it.
"""

import asyncio
import logging
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple, Protocol

from ocgpu.server.relay.asgi import Scope

__all__ = ["Guarded", "Liveness", "Table", "guard", "look_up"]

logger: Final = logging.getLogger("ocgpu.server")

_LOOK_SECONDS: Final = 1.0
# A row may slip through while the table changes under the dump: two looks must miss it.
_LOOKS: Final = 2
# include/uapi/linux/sock_diag.h, inet_diag.h, netlink.h; include/net/tcp_states.h
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_REQUEST_DUMP: Final = 0x301
_ERROR: Final = 2
_DONE: Final = 3
_ESTABLISHED: Final = 1
_CLOSE_WAIT: Final = 8
_LISTEN: Final = 10
_STATES: Final = 1 << _ESTABLISHED | 1 << _CLOSE_WAIT | 1 << _LISTEN
_HEADER: Final = struct.Struct("=IHHII")
# Family, protocol, extensions, padding, states; ports in network order, addresses, interface,
# cookie.
_QUESTION: Final = struct.Struct("=BBBxI2s2s16s16sIII")
# Of a row: state; the client's port and address.
_ROW: Final = "=17xB4x2s16x{width}s{rest}x"
_ROW_SIZE: Final = struct.calcsize("=17xB4x2s16x")
_RECEIVE_BYTES: Final = 2**15
_RECEIVE_SECONDS: Final = 2.0

Client = bytes
Place = tuple[int, int]


class Table(NamedTuple):
    """The connections of one port.

    Attributes:
        alive: Clients whose connection stands, as port and address in network order.
        leaving: Clients that have closed theirs.
    """

    alive: set[Client]
    leaving: set[Client]


class Guarded:
    """One request whose client is looked for. Made by `Liveness.guard`."""

    __slots__ = ("_client", "_missed", "on_gone", "place", "scope", "since")

    def __init__(self, scope: Scope, since: float, on_gone: Callable[[], None]) -> None:
        self.scope = scope
        self.since = since
        self.on_gone = on_gone
        self.place: Place | None = None
        self._client = b""
        self._missed = 0

    def locate(self) -> Place | None:
        """Give address family and port of the listener; None where these are no IP addresses."""
        client, server = self.scope.get("client"), self.scope.get("server")
        if self.place is not None or not client or not server:
            return self.place
        family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
        try:
            # An IPv4 client of an IPv6 listener comes as `::ffff:` and its address, here and there.
            address = socket.inet_pton(family, client[0])
            self._client = int(client[1]).to_bytes(2, "big") + address
            self.place = int(family), int(server[1])
        except (OSError, ValueError):
            return None
        return self.place

    def missing(self, table: Table) -> bool:
        """Whether its client is gone, as far as this look and those before say."""
        if self._client in table.alive:
            self._missed = 0
            return False
        self._missed += 1
        return self._client in table.leaving or self._missed >= _LOOKS


class _LookUp(Protocol):
    def __call__(self, place: Place) -> Table | None: ...


class Liveness:
    """Looks for the clients of all requests that wait. One for each loop; see `guard`.

    Args:
        look_up: Gives a port's connections, from another thread; None is not to know.
    """

    def __init__(self, look_up: _LookUp) -> None:
        self._look_up = look_up
        self._guarded: set[Guarded] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._blind = False

    def guard(self, scope: Scope, on_gone: Callable[[], None]) -> Guarded:
        """Call `on_gone` once should the client leave before `release`."""
        loop = asyncio.get_running_loop()
        guarded = Guarded(scope, loop.time(), on_gone)
        self._guarded.add(guarded)
        self._wind(loop)
        return guarded

    def release(self, guarded: Guarded) -> None:
        """Look for it no more; harmless when it is gone."""
        self._guarded.discard(guarded)

    def _wind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and self._looking is None and not self._blind:
            self._timer = loop.call_later(_LOOK_SECONDS, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        before = loop.time() - _LOOK_SECONDS / 2
        old = [guarded for guarded in self._guarded if guarded.since <= before]
        if old:
            self._looking = loop.create_task(self._look(old))
            self._looking.add_done_callback(lambda _task: self._looked(loop))
        elif self._guarded:
            self._wind(loop)

    def _looked(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looking = None
        if self._guarded and not loop.is_closed():
            self._wind(loop)

    async def _look(self, old: list[Guarded]) -> None:
        places = {place for guarded in old if (place := guarded.locate()) is not None}
        tables = await asyncio.to_thread(self._look_up_all, places)
        for guarded in old:
            table = tables.get(guarded.place) if guarded.place is not None else None
            if table is not None and guarded in self._guarded and guarded.missing(table):
                self._guarded.discard(guarded)
                guarded.on_gone()

    def _look_up_all(self, places: Iterable[Place]) -> dict[Place, Table]:
        try:
            return {place: table for place in places if (table := self._look_up(place)) is not None}
        except OSError as error:
            self._blind = True
            logger.warning("clients that leave behind a pipelined request are not seen: %s", error)
            return {}


def look_up(place: Place) -> Table | None:
    """Ask the kernel for the connections of a port.

    Args:
        place: Address family and port of the listener.

    Returns:
        None when the kernel's answer lacks the listener itself: it speaks of another network
        namespace than the listener's, or is not whole.

    Raises:
        OSError: The kernel does not answer such questions.
    """
    family, port = place
    question = _QUESTION.pack(
        family, socket.IPPROTO_TCP, 0, _STATES, port.to_bytes(2, "big"), b"", b"", b"", 0, 0, 0
    )
    size = _HEADER.size + len(question)
    table = Table(set(), set())
    listening = False
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_RECEIVE_SECONDS)
        kernel.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + question)
        while True:
            rows = kernel.recv(_RECEIVE_BYTES)
            done, listened = _read(rows, 4 if family == socket.AF_INET else 16, table)
            listening = listening or listened
            if done:
                return table if listening else None


def _read(rows: bytes, width: int, table: Table) -> tuple[bool, bool]:
    """Put rows into the table; whether these were the last, and whether a listener was there."""
    at, listening = 0, False
    while at < len(rows):
        size, kind = _HEADER.unpack_from(rows, at)[:2]
        if kind == _DONE:
            return True, listening
        if kind == _ERROR:
            number = -struct.unpack_from("=i", rows, at + _HEADER.size)[0]
            raise OSError(number, "the kernel's table of sockets cannot be read")
        stride = size + 3 & ~3
        count = _alike(rows, at, stride)
        row = struct.Struct(_ROW.format(width=width, rest=stride - _ROW_SIZE - width))
        for state, port, address in row.iter_unpack(rows[at : at + stride * count]):
            if state == _ESTABLISHED:
                table.alive.add(port + address)
            elif state == _CLOSE_WAIT:
                table.leaving.add(port + address)
            else:
                listening = True
        at += stride * count
    return False, listening


def _alike(rows: bytes, at: int, stride: int) -> int:
    """Count the rows from here on if all have one length and kind; else there is this one.

    Ten thousand rows are then read in a fifth of the time, under which the loop cannot run.
    """
    count = (len(rows) - at) // stride
    end = at + count * stride
    alike = all(
        rows[start:end:stride] == rows[start : start + 1] * count for start in range(at, at + 6)
    )
    return count if alike else 1


_of_loop: dict[asyncio.AbstractEventLoop, Liveness] = {}


def guard(scope: Scope, on_gone: Callable[[], None]) -> Callable[[], None]:
    """Call `on_gone` once should the client leave; give what ends that.

    Args:
        scope: The connection's scope.
        on_gone: Called in the running loop.
    """
    if sys.platform != "linux":
        return _nothing
    loop = asyncio.get_running_loop()
    found = _of_loop.get(loop)
    if found is None:
        for closed in [other for other in _of_loop if other.is_closed()]:
            del _of_loop[closed]
        found = _of_loop[loop] = Liveness(look_up)
    return partial(found.release, found.guard(scope, on_gone))


def _nothing() -> None:
    """Nobody is looked for."""
