"""The rows of the table: what is measured, and the bar for it."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benches.proxy.samples import (
    Measure,
    Sample,
    Samples,
    chunk_cpu,
    cpu_us,
    differences,
    gone_ms,
    p50_us,
    p99_us,
    rate,
    ratios,
)
from benches.proxy.targets import DIRECT, FRESH, GO, NGINX, OCGPU, POOLED, UPGRADE

__all__ = ["ROWS", "Bar", "Row"]

GET = ("--method", "GET", "--path", "/api/version", "--body", "0")
POST = ("--method", "POST", "--path", "/api/generate", "--body", "2048")
SOCKET = ("--method", "WEBSOCKET", "--path", "/ws", "--body", "0")
STREAMS, STREAM_RATE = 64, 100
CUT, CUT_RATE = 250, 10


@dataclass(frozen=True)
class Bar:
    """What is to be reached.

    Attributes:
        values: What is held against it, of every round.
        unit: Of the values, as it follows a number.
        limit: The bar; None where there is none, and the figure is for information.
        least: The values are to be at least this, else at most.
        digits: Behind the point.
        worst: The worst round counts and not the middle one.
    """

    values: Callable[[Samples], list[float]]
    unit: str
    limit: float | None
    least: bool = False
    digits: int = 2
    worst: bool = False

    def met(self, values: list[float]) -> bool | None:
        """Whether these values reach it; None where there is no bar."""
        if self.limit is None:
            return None
        if self.worst:
            return min(values) >= self.limit if self.least else max(values) <= self.limit
        middle = statistics.median(values)
        return middle >= self.limit if self.least else middle <= self.limit


@dataclass(frozen=True)
class Row:
    """One thing that is measured of all targets.

    Attributes:
        name: For `--only`.
        title: For people.
        mode: Of the load.
        options: Of the load.
        listener: Which port of a target it asks.
        shown: What a cell says: its measures, each with its digits and unit.
        bars: What is to be reached.
        timed: It lasts as long as it is told; else it happens once a round.
        fresh: Every request has to reach the upstream on a connection of its own.
        targets: Whom it is measured of.
    """

    name: str
    title: str
    mode: str
    options: tuple[str, ...]
    listener: str
    shown: tuple[tuple[Measure, int, str], ...]
    bars: tuple[Bar, ...]
    timed: bool = True
    fresh: bool = False
    targets: tuple[str, ...] = (OCGPU, NGINX, GO, DIRECT)


def times(other: str, limit: float) -> Bar:
    """A bar for how many times another's rate we reach."""
    return Bar(lambda s: ratios(s, rate, OCGPU, other), f" x {other}", limit, least=True)


def cpu_times(measure: Measure, other: str, limit: float | None) -> Bar:
    """A bar for how many times another's CPU we use."""
    return Bar(lambda s: ratios(s, measure, OCGPU, other), f" x {other} in CPU", limit)


def added(measure: Measure, what: str, limit: float | None) -> Bar:
    """A bar for what we add to no proxy, in microseconds."""
    return Bar(
        lambda s: differences(s, measure, OCGPU, DIRECT), f" us added {what}", limit, digits=0
    )


def within(limit_ms: float) -> Bar:
    """A bar for how long the last one takes to be gone."""
    return Bar(
        lambda s: list(map(gone_ms, s.get(OCGPU, []))), " ms", limit_ms, digits=1, worst=True
    )


def requests(connections: int, *options: str) -> tuple[str, ...]:
    """Options of a closed loop."""
    return (*options, "--connections", str(connections))


RATE = ((rate, 0, "/s"), (cpu_us, 1, " us CPU"))
LATENCY = ((p50_us, 0, " us p50"), (p99_us, 0, " us p99"))
LAG = (*LATENCY, (chunk_cpu, 3, " s CPU/10k"))

ROWS = (
    Row(
        "get-16",
        "small GET, 16 connections",
        "requests",
        requests(16, *GET),
        POOLED,
        RATE,
        (times(NGINX, 0.5), times(GO, 1.0), cpu_times(cpu_us, NGINX, None)),
    ),
    Row(
        "get-64",
        "small GET, 64 connections",
        "requests",
        requests(64, *GET),
        POOLED,
        RATE,
        (times(NGINX, 0.5), times(GO, 1.0), cpu_times(cpu_us, NGINX, None)),
    ),
    Row(
        "post-16",
        "locked POST of 2 KB, fresh upstream connections, 16 connections",
        "requests",
        requests(16, *POST),
        FRESH,
        RATE,
        (times(NGINX, 0.35), cpu_times(cpu_us, NGINX, None)),
        fresh=True,
    ),
    Row(
        "latency-get",
        "small GET, 1 connection",
        "requests",
        requests(1, *GET),
        POOLED,
        LATENCY,
        (added(p50_us, "p50", 100), added(p99_us, "p99", None)),
    ),
    Row(
        "latency-post",
        "locked POST of 2 KB, fresh upstream connections, 1 connection",
        "requests",
        requests(1, *POST),
        FRESH,
        LATENCY,
        (added(p50_us, "p50", 300), added(p99_us, "p99", None)),
        fresh=True,
    ),
    Row(
        "streams",
        "64 streams of 100 chunks/s of 120 B: lag of a chunk",
        "streams",
        ("--streams", str(STREAMS), "--rate", str(STREAM_RATE)),
        FRESH,
        LAG,
        (
            added(p50_us, "p50", 80),
            added(p99_us, "p99", 300),
            cpu_times(chunk_cpu, NGINX, 1.8),
        ),
    ),
    Row(
        "websocket",
        "websocket echo of 64 B, 16 connections",
        "requests",
        requests(16, *SOCKET),
        UPGRADE,
        RATE,
        (times(NGINX, 0.35), cpu_times(cpu_us, NGINX, None)),
    ),
    Row(
        "cut",
        "250 running streams cut at once: the upstream saw the last one go",
        "cut",
        ("--streams", str(CUT), "--rate", str(CUT_RATE)),
        FRESH,
        ((gone_ms, 1, " ms"),),
        (within(20),),
        timed=False,
    ),
    Row(
        "waiters",
        "250 chats that wait behind an image cut at once: `/healthz` counts none",
        "waiters",
        ("--streams", str(CUT)),
        FRESH,
        ((gone_ms, 1, " ms"),),
        (within(20),),
        timed=False,
        targets=(OCGPU,),
    ),
)
"""In the order of the table."""


def cell(row: Row, sample_list: list[Sample]) -> str:
    """What a table says of one target: the middle of its rounds."""
    parts = []
    for measure, digits, unit in row.shown:
        if measure in (cpu_us, chunk_cpu) and not any(s["cpu_ns"] for s in sample_list):
            continue
        parts.append(f"{statistics.median(map(measure, sample_list)):,.{digits}f}{unit}")
    return ", ".join(parts)
