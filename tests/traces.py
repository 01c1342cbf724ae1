"""What a worker's trace says: work, stalls, hand-overs. Times are seconds of CLOCK_MONOTONIC."""

import math
from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

__all__ = [
    "Step",
    "Trace",
    "hand_overs",
    "percentile",
    "recovery",
    "releases",
    "stalls",
    "waiting",
    "work",
]


class Step(NamedTuple):
    """One step: when `step()` was called and returned, when the work ended, how much it was."""

    asked: float
    began: float
    ended: float
    size: int


class Trace(NamedTuple):
    """All steps of one worker, and the moments at which a request of it ended."""

    steps: list[Step]
    idles: list[float]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "Trace":
        """Read what a worker printed, which is in nanoseconds."""
        steps = [Step(a / 1e9, b / 1e9, e / 1e9, size) for a, b, e, size in answer["steps"]]
        return cls(steps, [idle / 1e9 for idle in answer["idles"]])


def work(trace: Trace, start: float, end: float) -> float:
    """Bytes hashed in a span; those of a step are spread evenly over it."""
    done = 0.0
    first = bisect_right(trace.steps, start, key=lambda step: step.ended)
    last = bisect_left(trace.steps, end, key=lambda step: step.began)
    for step in trace.steps[first:last]:
        inside = min(step.ended, end) - max(step.began, start)
        done += step.size * inside / (step.ended - step.began)
    return done


def waiting(trace: Trace, start: float, end: float) -> float:
    """The part of a span that was spent in `step()`.

    Unlike a rate it does not waver with the neighbours of the core: one alone never waits.
    """
    spent = 0.0
    for step in trace.steps:
        spent += max(0.0, min(step.began, end) - max(step.asked, start))
    return spent / (end - start)


def stalls(trace: Trace, start: float, end: float) -> list[float]:
    """Gaps between ends of steps that end in a span or are under way when it ends.

    The gap before the first step of a request begins when that step was asked for.
    """
    gaps: list[float] = []
    last: float | None = None
    for step in trace.steps:
        if last is None or bisect_right(trace.idles, step.asked) > bisect_left(trace.idles, last):
            last = step.asked
        if last < end and step.ended > start:
            gaps.append(step.ended - last)
        last = step.ended
    return gaps


def hand_overs(traces: list[Trace], start: float, end: float) -> list[float]:
    """Seconds from the end of one peer's step to the begin of a step of another that waited.

    Counted where the first peer waited in its turn afterwards: its next step began later.
    """
    ends = sorted(
        (step.ended, following.began, who)
        for who, trace in enumerate(traces)
        for step, following in zip(trace.steps, trace.steps[1:], strict=False)
    )
    times = [entry[0] for entry in ends]
    found: list[float] = []
    for who, trace in enumerate(traces):
        for step in trace.steps:
            if not start <= step.began < end:
                continue
            before = bisect_right(times, step.began) - 1
            if before < 0:
                continue
            ended, next_began, other = ends[before]
            if other != who and ended > step.asked and next_began > step.began:
                found.append(step.began - ended)
    return found


def releases(leaving: Trace, staying: Trace) -> list[float]:
    """Seconds from each end of a request of one peer to the begin of the other's step.

    Counted where the other waited at that moment; where it ran already, there is nothing to wait
    for.
    """
    asked = [step.asked for step in staying.steps]
    found: list[float] = []
    for idle in leaving.idles:
        at = bisect_right(asked, idle) - 1
        if at >= 0 and staying.steps[at].began > idle:
            found.append(staying.steps[at].began - idle)
    return found


def recovery(trace: Trace, fault: float, solo: float, *, window: float, part: float) -> float:
    """Seconds from a fault until the work of the `window` before is `part` of `solo` a second.

    Returns:
        `inf` when it never is.
    """
    last = trace.steps[-1].ended if trace.steps else fault
    now = fault
    while now <= last:
        if work(trace, now - window, now) >= part * solo * window:
            return now - fault
        now += 0.001
    return math.inf


def percentile(values: list[float], percent: float) -> float:
    """The nearest rank; NaN of nothing."""
    if not values:
        return math.nan
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]
