"""How peers with work without end split the core, and how much of it they use."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from tests.sharers import Device, Peer, settle, sharers, targets
from tests.traces import percentile, stalls, work

from benches.sharing.conditions import CoreUse, Meter

__all__ = ["CASES", "Run", "measure", "runs"]

DECODE = Peer(1, 8)
UNGATED = Peer(1, 8, ungated=True)
PREFILLS = Peer(1, 8, prefill_ms=300, steps=60)
CASES: dict[str, list[Peer]] = {
    "1:1, 8 ms": [DECODE] * 2,
    "1:1, 8 and 30 ms": [DECODE, Peer(1, 30)],
    "2:1, 8 ms": [Peer(2, 8), DECODE],
    "2:1, 8 and 30 ms": [Peer(2, 8), Peer(1, 30)],
    "2:1, 30 and 8 ms": [Peer(2, 30), DECODE],
    "2:1:1, 8 ms": [Peer(2, 8), DECODE, DECODE],
    "2:1:1, 8, 30 and 30 ms": [Peer(2, 8), Peer(1, 30), Peer(1, 30)],
    "2:1:1, 30, 8 and 8 ms": [Peer(2, 30), DECODE, DECODE],
    "4:1, 8 ms": [Peer(4, 8), DECODE],
    "4:1, 8 and 30 ms": [Peer(4, 8), Peer(1, 30)],
    "4:1, 30 and 8 ms": [Peer(4, 30), DECODE],
    "1x8, 8 ms": [DECODE] * 8,
    "1:1, decode beside 300 ms prefill + 60 decode": [DECODE, PREFILLS],
    "2:1, decode beside 300 ms prefill + 60 decode": [Peer(2, 8), PREFILLS],
    "1:1, 8 ms, the second ungated": [DECODE, UNGATED],
    "1:2, 8 ms, the second ungated": [DECODE, Peer(2, 8, ungated=True)],
    "1:1, 30 and 8 ms, the second ungated": [Peer(1, 30), UNGATED],
    "1:1:1, 8, 30 and 8 ms, the third ungated": [DECODE, Peer(1, 30), UNGATED],
    "1:1:1, 8, 30 and 30 ms, the third ungated": [DECODE, Peer(1, 30), Peer(1, 30, ungated=True)],
}


@dataclass(frozen=True)
class Run:
    """One case under one schedule.

    Attributes:
        case: Which, a key of `CASES`.
        schedule: `unpaced`, `grid` or `turn`.
        seconds: How long, after the warm-up.
        shares: Each peer's part of all work.
        error: The largest |share / target - 1| of a peer.
        rate: Work of all, in units of what one alone does in the same time by calibration.
        stall_ms: p50, p95 and longest gap between ends of steps, each of the peer it is worst for.
        core: Where the core's time went.
    """

    case: str
    schedule: str
    seconds: float
    shares: list[float]
    error: float
    rate: float
    stall_ms: list[float]
    core: CoreUse

    @property
    def rate_of_left(self) -> float:
        """`rate` by the part of the core that others left."""
        return self.rate / (1.0 - self.core.others - self.core.steal)


def runs(
    device: Device, case: str, schedules: list[str], seconds: float, warm_up: float
) -> Iterator[Run]:
    """Measure a case: the schedules between two halves of an unpaced run.

    The speed of a shared machine drifts; a straight drift cancels in the mean of the halves.
    """
    yield measure(device, case, "unpaced", seconds / 2, warm_up)
    for schedule in schedules:
        yield measure(device, case, schedule, seconds, warm_up)
    yield measure(device, case, "unpaced", seconds / 2, warm_up)


def measure(device: Device, case: str, schedule: str, seconds: float, warm_up: float) -> Run:
    """Measure a case under one schedule.

    Raises:
        RuntimeError: Another schedule is in force.
    """
    peers = CASES[case]
    with sharers(*device.commands(peers, schedule)) as workers:
        settle(workers, warm_up)
        force = {schedule}
        if schedule != "unpaced":
            force = {worker.snapshot()["schedule"] for worker in workers}
        if force != {schedule}:
            raise RuntimeError(f"not `{schedule}` but another schedule is in force: {force}")
        meter = Meter(device.core, [worker.pid for worker in workers])
        start = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        core = meter.use()
        traces = [worker.trace(until=end) for worker in workers]
    done = [work(trace, start, end) for trace in traces]
    gaps = [stalls(trace, start, end) for trace in traces]
    shares = [part / sum(done) for part in done]
    errors = [abs(s / t - 1) for s, t in zip(shares, targets(peers), strict=True)]
    return Run(
        case=case,
        schedule=schedule,
        seconds=end - start,
        shares=shares,
        error=max(errors),
        rate=sum(done) / ((end - start) * device.bytes_per_ms * 1000),
        stall_ms=[max(percentile(gap, p) for gap in gaps) * 1000 for p in (50, 95, 100)],
        core=core,
    )
