"""Which processes are an engine: who listens at its port, and what they have started.

Ollama's memory is that of a child, `llama-server`, so a process counts with its descendants. Linux
only, and only processes that we may look into: root's view is whole, ours is what is ours. Of an
engine that another user runs, the kernel tells that user. All of it may block and belongs in a
thread.
"""

import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ocgpu.addresses import Address, is_own, resolve
from ocgpu.lineage import INIT_PID
from ocgpu.server.relay.address import Address as EngineAddress

__all__ = ["EngineFinder", "Listeners", "listeners", "listening_pids", "local_addresses"]

_PROC: Final = Path("/proc")
_LISTENING: Final = "0A"
# They listen for somebody in another network namespace.
_FORWARDERS: Final = frozenset(("docker-proxy", "rootlessport", "slirp4netns", "pasta", "conmon"))
# All descriptors of the machine are looked through: not for each look at the driver.
_SEARCH_SECONDS: Final = 15.0


class Listeners(NamedTuple):
    """Who listens somewhere.

    Attributes:
        pids: The processes, as far as we may look into them.
        uids: Whose they are, where we may not.
    """

    pids: frozenset[int]
    uids: frozenset[int]


_NOBODY: Final = Listeners(frozenset(), frozenset())


class EngineFinder:
    """Finds the processes of one engine again and again, mostly without a search.

    Args:
        url: Where it listens.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._found = _NOBODY
        self._links: dict[Path, str] = {}
        self._searched: float | None = None

    def find(self) -> Listeners:
        """Give who listens there now; nobody when the engine is on another machine."""
        if self._links and all(_target(link) == target for link, target in self._links.items()):
            return self._found
        now = time.monotonic()
        if self._links or self._searched is None or now - self._searched >= _SEARCH_SECONDS:
            self._searched = now
            self._search()
        return self._found

    def _search(self) -> None:
        address = EngineAddress.parse(self._url)
        sockets = _listening(local_addresses(address.host), address.port)
        holders = _holders(sockets)
        self._links = {link: _target(link) for link in holders.values()}
        self._found = _as_listeners(sockets, holders)


def local_addresses(host: str) -> list[Address]:
    """Give the IP addresses of a host if it is this machine, else none."""
    return [address for address in dict.fromkeys(resolve(host)) if is_own(address)]


def listeners(addresses: Iterable[Address], port: int) -> Listeners:
    """Give who holds the sockets that listen there."""
    sockets = _listening(addresses, port)
    return _as_listeners(sockets, _holders(sockets))


def listening_pids(addresses: Iterable[Address], port: int) -> frozenset[int]:
    """Give the processes that hold the socket which listens there; none where none is seen."""
    return listeners(addresses, port).pids


def _as_listeners(sockets: Mapping[str, int], holders: Mapping[int, Path]) -> Listeners:
    pids = frozenset(holders)
    if len(pids) > 1:
        # Whoever starts processes by socket holds the socket as well.
        pids -= {INIT_PID}
    return Listeners(pids, frozenset() if pids else frozenset(sockets.values()))


def _listening(addresses: Iterable[Address], port: int) -> dict[str, int]:
    """Give the sockets that listen there, as links to them look, with their users."""
    places = {f"{form}:{port:04X}" for address in addresses for form in _forms(address)}
    sockets = {}
    for name in ("net/tcp", "net/tcp6"):
        try:
            lines = (_PROC / name).read_text().splitlines()[1:]
        except OSError:
            continue
        # A busy machine has thousands of connections here.
        for fields in (line.split() for line in lines if f":{port:04X} " in line):
            if fields[3] == _LISTENING and fields[1] in places:
                sockets[f"socket:[{fields[9]}]"] = int(fields[7])
    return sockets


def _forms(address: Address) -> list[str]:
    """Give the kernel's spellings of the addresses under which a socket hears one address."""
    forms = [_spelled(address.packed), _spelled(bytes(16))]
    if address.version == 4:
        mapped = bytes(10) + b"\xff\xff" + address.packed
        forms += [_spelled(bytes(4)), _spelled(mapped)]
    return forms


def _spelled(packed: bytes) -> str:
    return "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", packed))


def _pids() -> list[int]:
    return [int(folder.name) for folder in _PROC.iterdir() if folder.name.isdigit()]


def _holders(sockets: Mapping[str, int]) -> dict[int, Path]:
    """Give the processes that hold one of the sockets, and the link to it."""
    if not sockets:
        return {}
    found = {pid: link for pid in _pids() if (link := _link(pid, sockets)) is not None}
    return {pid: link for pid, link in found.items() if _command(pid) not in _FORWARDERS}


def _link(pid: int, sockets: Mapping[str, int]) -> Path | None:
    try:
        links = list((_PROC / str(pid) / "fd").iterdir())
    except OSError:
        # Somebody else's, or gone.
        return None
    return next((link for link in links if _target(link) in sockets), None)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        # Closed since it was listed.
        return ""


def _command(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""
