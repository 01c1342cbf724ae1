"""Which processes are an engine: who listens at its port, and what they have started.

Ollama's memory is that of a child, `llama-server`, so a process counts with its descendants. Linux
only, and only processes that we may look into: root's view is whole, ours is what is ours. All of
it may block and belongs in a thread.
"""

import ipaddress
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["is_descendant", "listening_pids", "local_addresses"]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_PROC: Final = Path("/proc")
_LISTENING: Final = "0A"
# Longer chains of parents are a mistake of ours.
_GENERATIONS_MAX: Final = 64


def local_addresses(host: str) -> list[Address]:
    """Give the IP addresses of a host if it is this machine, else none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found}
    return [address for address in addresses if _is_own(address)]


def listening_pids(addresses: Iterable[Address], port: int) -> frozenset[int]:
    """Give the processes that hold the socket which listens there; none where none is seen."""
    inodes = _listening_inodes(addresses, port)
    if not inodes:
        return frozenset()
    return frozenset(pid for pid in _pids() if _holds(pid, inodes))


def is_descendant(pid: int, roots: frozenset[int]) -> bool | None:
    """Whether a process is one of `roots` or was started by one; None when it is not to be seen."""
    seen: bool | None = None
    for _ in range(_GENERATIONS_MAX):
        if pid in roots:
            return True
        parent = _parent(pid)
        if parent is None:
            return seen
        seen = False
        pid = parent
    return seen


def _is_own(address: Address) -> bool:
    """Whether the address is one of this machine: only such a one can be bound."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def _listening_inodes(addresses: Iterable[Address], port: int) -> frozenset[str]:
    places = {f"{form}:{port:04X}" for address in addresses for form in _forms(address)}
    inodes = set()
    for name in ("net/tcp", "net/tcp6"):
        try:
            lines = (_PROC / name).read_text().splitlines()[1:]
        except OSError:
            continue
        # A busy machine has thousands of connections here.
        for fields in (line.split() for line in lines if f":{port:04X} " in line):
            if fields[3] == _LISTENING and fields[1] in places:
                inodes.add(fields[9])
    return frozenset(inodes)


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


def _holds(pid: int, inodes: frozenset[str]) -> bool:
    try:
        links = list((_PROC / str(pid) / "fd").iterdir())
    except OSError:
        # Somebody else's, or gone.
        return False
    return any(_inode(link) in inodes for link in links)


def _inode(link: Path) -> str:
    try:
        return str(link.readlink()).removeprefix("socket:[").removesuffix("]")
    except OSError:
        # Closed since it was listed.
        return ""


def _parent(pid: int) -> int | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in brackets may hold anything, brackets too.
    return int(stat.rpartition(")")[2].split()[1])
