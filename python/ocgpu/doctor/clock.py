"""The clock by which peers agree on windows and date their heartbeats."""

import time
from pathlib import Path
from typing import Final, NamedTuple

from ocgpu.doctor.finding import Finding, error, ok, warning

__all__ = ["Reading", "check_clock", "check_source", "current_source", "read_clocks"]

_CLOCK: Final = "clock"
_SOURCE: Final = "clock source"
_SOURCES: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
# Each read of these is a system call and slow hardware: microseconds instead of 20 ns.
_SLOW: Final = frozenset(("acpi_pm", "hpet", "jiffies", "pit", "refined-jiffies"))
_STEP_SECONDS: Final = (
    0.02  # more than being put aside between two reads explains, on most machines
)
_DEAD_SECONDS: Final = 3.0  # of silence, after which peers that date heartbeats take one for dead


class Reading(NamedTuple):
    """Both clocks at one moment, seconds.

    Attributes:
        wall: CLOCK_REALTIME.
        monotonic: CLOCK_MONOTONIC, which nobody can set.
    """

    wall: float
    monotonic: float


def read_clocks(attempts: int = 5) -> Reading:
    """Read both as near to each other as can be: of several pairs, the quickest."""
    best, gap = Reading(time.time(), time.monotonic()), float("inf")
    for _ in range(attempts):
        before = time.monotonic()
        wall = time.time()
        after = time.monotonic()
        if after - before < gap:
            best, gap = Reading(wall, (before + after) / 2), after - before
    return best


def check_clock(before: Reading, after: Reading) -> list[Finding]:
    """Compare how far both went between two moments: a difference is a step of the wall clock."""
    length = after.monotonic - before.monotonic
    step = (after.wall - before.wall) - length
    if abs(step) < _STEP_SECONDS:
        return [ok(_CLOCK, f"no step of the wall clock in {length:.1f} s")]
    found = f"the wall clock was stepped by {step:+.3f} s while we looked"
    remedy = "see who sets it (`timedatectl`, ntpd, a hypervisor); let one daemon slew it"
    if abs(step) >= _DEAD_SECONDS:
        return [error(_CLOCK, f"{found}: peers of other programs are taken for dead", remedy)]
    return [warning(_CLOCK, f"{found}: windows shift", remedy)]


def check_source(source: str | None) -> list[Finding]:
    """Judge what the kernel keeps time by; None where that is not known."""
    if source is None:
        return [ok(_SOURCE, "not known")]
    if source in _SLOW:
        remedy = "see `dmesg` on why the kernel gave up `tsc`; boot with `tsc=reliable` if it is"
        return [warning(_SOURCE, f"{source}: reading the time is slow, at each step", remedy)]
    return [ok(_SOURCE, source)]


def current_source(path: Path = _SOURCES) -> str | None:
    """Read what the kernel keeps time by."""
    try:
        return path.read_text().strip() or None
    except (OSError, ValueError):
        return None
