"""Which requests need the card: the type of a route table and its one lookup.

The tables are data and stand with their engines. Only a POST starts work on a GPU in every engine
that we know, so other methods pass. The path is the percent-decoded one without the query, because
upstreams decode before they route: `POST /%70rompt` queues a real job in ComfyUI.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ocgpu.server.arbiter import Kind

__all__ = ["RouteTable", "lookup"]


@dataclass(frozen=True, slots=True)
class RouteTable:
    """What POST requests of one engine need.

    Attributes:
        exact: Path to the kind of work that it starts; None passes.
        passing: Prefixes that pass although they lie under one of `locked`.
        locked: Prefix to the kind of work that an unknown path below it is taken to start: a list
            of known paths ages fast, and a path that bypasses the lock costs more than one that
            waits without need.
    """

    exact: Mapping[str, Kind | None]
    passing: tuple[str, ...] = ()
    locked: tuple[tuple[str, Kind], ...] = ()


def lookup(table: RouteTable, method: str, path: str) -> Kind | None:
    """Say which kind of work a request starts; None passes without the lock."""
    # Upstreams take `post` for a POST, or are sent one by a client library in between.
    if method.upper() != "POST":
        return None
    if path in table.exact:
        return table.exact[path]
    if path.startswith(table.passing):
        return None
    for prefix, kind in table.locked:
        if path.startswith(prefix):
            return kind
    return None
