"""The peers and the lease of a GPU as rows for a person: framed on a terminal, plain elsewhere.

Names and reasons are what other processes wrote about themselves, so each is made printable first.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from ocgpu.durations import format_duration
from ocgpu.text import printable

if TYPE_CHECKING:
    from ocgpu._ocgpu import LeaseStatus
    from ocgpu.snapshot import Snapshot

__all__ = ["Table", "lease_table", "peers_table", "show"]


class Table(NamedTuple):
    """Rows under a header; the last column is the one that may be long."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


_PEER_HEADER: Final = ("PID", "WEIGHT", "SHARE", "BUSY", "STATE", "HEARTBEAT", "SLOT", "LEASE")
_MIB: Final = 1 << 20
_NO_MEMORY: Final[Mapping[int, int | None]] = {}


def peers_table(snapshot: "Snapshot", memory: Mapping[int, int | None] = _NO_MEMORY) -> Table:
    """Describe who shares the compute of a GPU.

    Args:
        snapshot: The peers.
        memory: Bytes of the GPU's memory by pid; a column of its own where any is known.
    """
    known = any(size is not None for size in memory.values())
    rows = [
        (
            str(peer.pid),
            f"{peer.weight:g}",
            f"{peer.share * 100:.1f}%",
            f"{peer.busy * 100:.1f}%",
            peer.state,
            f"{peer.heartbeat_age_ms}ms",
            str(peer.slot),
            peer.lease or "-",
            *((_size(memory.get(peer.pid)),) if known else ()),
            printable(peer.name),
        )
        for peer in snapshot.peers
    ]
    count = {0: "no peers", 1: "1 peer"}.get(len(rows), f"{len(rows)} peers")
    return Table(
        f"gpu {printable(snapshot.gpu_key)}: {count}, schedule {snapshot.schedule}",
        (*_PEER_HEADER, *(("MEMORY",) if known else ()), "NAME"),
        rows,
    )


def lease_table(gpu_key: str, status: "LeaseStatus", *, now: float | None = None) -> Table:
    """Describe who holds a lease and who waits for it, with ages up to `now`, Unix seconds."""
    moment = time.time() if now is None else now
    parties = [("holder", party) for party in status.holders]
    parties += [("waiter", party) for party in status.waiters]
    rows = [
        (
            role,
            _known(party.pid),
            _known(party.mode),
            _age(party.since, moment),
            _known(party.name),
            _known(party.reason),
        )
        for role, party in parties
    ]
    return Table(
        f"gpu {printable(gpu_key)}: lease {f'held, {status.mode}' if status.held else 'free'}",
        ("ROLE", "PID", "MODE", "FOR", "NAME", "REASON"),
        rows,
    )


def _size(size: int | None) -> str:
    return "?" if size is None else f"{round(size / _MIB)}MiB"


def _known(value: str | int | None) -> str:
    return "?" if value is None else printable(str(value))


def _age(since: float | None, now: float) -> str:
    # Another process's clock may be a little ahead of the moment at which we asked.
    return "?" if since is None else format_duration(max(0.0, round(now - since)))


def show(table: Table) -> None:
    """Write `table` to stdout; without a terminal in plain columns that scripts can rely on."""
    if sys.stdout.isatty():
        _show_framed(table)
        return
    lines = [table.header, *table.rows] if table.rows else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sys.stdout.write(f"{table.title}\n")
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _show_framed(table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as Frame
    from rich.text import Text

    console = Console()
    # `Text` is taken as it is: a name such as `[red]` must not become markup.
    console.print(Text(table.title, style="bold"))
    if not table.rows:
        return
    frame = Frame()
    for name in table.header:
        frame.add_column(name)
    for row in table.rows:
        frame.add_row(*(Text(cell) for cell in row))
    console.print(frame)
