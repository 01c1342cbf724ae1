"""From whom a process descends, as far as this one may look.

Linux only; elsewhere nobody is to be seen. All of it reads `/proc` and belongs in a thread.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

__all__ = ["INIT_PID", "inner_pids", "is_descendant", "lineage"]

INIT_PID: Final = 1
"""Of whom everybody descends; and what the first process of a container is called in there."""

_PROC: Final = Path("/proc")
_INNER: Final = "NSpid:"
# Longer chains of parents are a mistake of ours.
_GENERATIONS_MAX: Final = 64


def lineage(pid: int) -> tuple[int, ...]:
    """Give the process, its parent, and so on; nothing when it is not to be seen."""
    found: list[int] = []
    while len(found) < _GENERATIONS_MAX:
        parent = _parent(pid)
        if parent is None:
            break
        found.append(pid)
        pid = parent
    return tuple(found)


def is_descendant(pid: int, roots: Collection[int]) -> bool | None:
    """Whether a process is one of `roots` or was started by one; None when it is not to be seen."""
    if pid in roots:
        return True
    found = lineage(pid)
    return any(ancestor in roots for ancestor in found) if found else None


def inner_pids(line: Iterable[int]) -> frozenset[int]:
    """Give the pids that processes have in the containers in which they run, to those in there."""
    return frozenset(inner for pid in line for inner in _inner(pid))


def _inner(pid: int) -> list[int]:
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return []
    # From the outside to the inside, ours first.
    spelled = next((line for line in lines if line.startswith(_INNER)), _INNER)
    return [int(number) for number in spelled.removeprefix(_INNER).split()[1:]]


def _parent(pid: int) -> int | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in brackets may hold anything, brackets too.
    return int(stat.rpartition(")")[2].split()[1])
