"""Who holds memory of a GPU, and from whom they descend: an engine's memory is often a child's.

Linux knows who descends from whom; elsewhere a process is found under its own pid alone.
"""

from collections.abc import Collection
from typing import NamedTuple

from ocgpu.gpu_memory import GpuMemory
from ocgpu.lineage import INIT_PID, inner_pids, lineage

__all__ = ["Occupancy", "Occupant", "memory_of", "occupancy"]


class Occupant(NamedTuple):
    """A process that the driver lists.

    Attributes:
        pid: Its own.
        memory_bytes: What it holds; None where the driver does not tell.
        computes: Whether it computes; others draw.
        lineage: Itself, its parent, and so on; empty when it is not to be seen from here.
        inner: What all these are called in containers; peers in there are known by such a pid.
    """

    pid: int
    memory_bytes: int | None
    computes: bool
    lineage: tuple[int, ...]
    inner: frozenset[int] = frozenset()


class Occupancy(NamedTuple):
    """All of them at one moment.

    Attributes:
        occupants: In the order of their pids.
        total: Bytes that are taken of the cards; None where no card answers.
        whole: Whether who is not listed holds nothing.
    """

    occupants: tuple[Occupant, ...]
    total: int | None
    whole: bool

    def by_root(self, roots: Collection[int]) -> dict[int, int | None]:
        """Give the bytes of processes with their descendants; None where that is not known.

        What descends from one that is itself among `roots` counts for the nearest alone. Nobody
        counts for init: who is called so is the first process of a container.
        """
        sums: dict[int, int | None] = dict.fromkeys(roots, 0)
        whole = self.whole
        for occupant in self.occupants:
            line = occupant.lineage or (occupant.pid,)
            root = next((pid for pid in line if pid in sums and pid != INIT_PID), None)
            if root is None:
                # One that is not to be seen may be anybody's, and so may one in a container.
                whole = whole and bool(occupant.lineage) and not occupant.inner
                continue
            known, size = sums[root], occupant.memory_bytes
            sums[root] = None if known is None or size is None else known + size
        return {pid: size if size or whole else None for pid, size in sums.items()}


def occupancy(memory: GpuMemory) -> Occupancy:
    """Look at the driver and at the processes. May block."""
    reading = memory.read()
    occupants = []
    for pid, size in sorted(reading.by_pid.items()):
        line = lineage(pid)
        occupants.append(Occupant(pid, size, pid in reading.computing, line, inner_pids(line)))
    return Occupancy(tuple(occupants), reading.total, reading.gap is None)


def memory_of(pids: Collection[int], gpu_key: str) -> dict[int, int | None]:
    """Give the bytes of a GPU that processes hold with their descendants; None where not known.

    May block.
    """
    memory = GpuMemory.open(gpu_key) if pids else None
    if memory is None:
        return dict.fromkeys(pids)
    try:
        return occupancy(memory).by_root(pids)
    finally:
        memory.close()
