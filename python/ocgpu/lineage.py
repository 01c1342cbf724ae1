"""From whom a process descends, as far as this one may look.

Linux only; elsewhere nobody is to be seen. All of it reads `/proc` and belongs in a thread.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Final

__all__ = ["is_descendant", "lineage"]

_PROC: Final = Path("/proc")
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


def _parent(pid: int) -> int | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in brackets may hold anything, brackets too.
    return int(stat.rpartition(")")[2].split()[1])
