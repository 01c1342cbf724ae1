"""How soon the time of one peer is another's: at a hand-over, an end of a request, a fault."""

import math
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.sharers import Device, Peer, Sharer, settle, sharers
from tests.traces import Trace, hand_overs, recovery, releases, stalls, work

from benches.sharing.conditions import CoreUse, Meter

__all__ = ["FAULTS", "WAITS", "Fault", "fault", "hand_over", "request_end"]

DECODE = Peer(1, 8)
WINDOW_S = 0.1
SOLO_PART = 0.95
GIVE_UP_S = 6.0


@dataclass(frozen=True)
class Fault:
    """What the survivor of a fault saw.

    Attributes:
        recovery_s: Seconds until its rate over the 100 ms before is 95 % of solo; None if never.
        stall_ms: Its longest gap between ends of steps from the fault on.
        core: Where the core's time went meanwhile; the survivor is the one worker.
    """

    recovery_s: float | None
    stall_ms: float
    core: CoreUse


def hand_over(device: Device, schedule: str, seconds: float) -> list[float]:
    """Seconds from the end of a step that gives way to the begin of the other's, 1:1 at 8 ms."""
    with sharers(*device.commands([DECODE, DECODE], schedule)) as workers:
        settle(workers)
        start = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        return hand_overs([worker.trace(until=end) for worker in workers], start, end)


def request_end(device: Device, schedule: str, seconds: float) -> list[float]:
    """Seconds from `idle()` of one peer to the begin of the other's step that waited then."""
    requests = Peer(1, 8, steps=10, think_s=0.05)
    with sharers(*device.commands([requests, DECODE], schedule)) as workers:
        settle(workers)
        time.sleep(seconds)
        end = time.monotonic()
        leaving, staying = (worker.trace(until=end) for worker in workers)
        return releases(leaving, staying)


def fault(device: Device, schedule: str, kind: str) -> Fault:
    """One of two peers (1:1 at 8 ms) fails at a random moment; watch the other."""
    with sharers(*device.commands([DECODE, DECODE], schedule)) as (survivor, victim):
        settle([survivor], 0.3)
        start = time.monotonic()
        end = start + 1.0
        solo = work(survivor.trace(until=end), start, end) / (end - start)
        settle([victim], 0.7)
        survivor.trace()
        # No schedule and no security hangs on this: any moment of the period will do.
        time.sleep(0.2 + random.random() * 0.4)  # noqa: S311
        meter = Meter(device.core, [survivor.pid])
        moment = FAULTS[kind](victim)
        return _watch(survivor, meter, moment, solo)


def _watch(survivor: Sharer, meter: Meter, moment: float, solo: float) -> Fault:
    seen = Trace([], [])
    back = math.inf
    while math.isinf(back) and time.monotonic() < moment + GIVE_UP_S:
        time.sleep(0.4)
        seen.steps.extend(survivor.trace(until=time.monotonic()).steps)
        back = recovery(seen, moment, solo, window=WINDOW_S, part=SOLO_PART)
    gaps = stalls(seen, moment, seen.steps[-1].ended)
    return Fault(None if math.isinf(back) else back, max(gaps) * 1000, meter.use())


def _signal(number: signal.Signals) -> Callable[[Sharer], float]:
    def send(victim: Sharer) -> float:
        moment = time.monotonic()
        victim.process.send_signal(number)
        return moment

    return send


WAITS = {"hand-over": hand_over, "request end to the other running": request_end}
FAULTS: dict[str, Callable[[Sharer], float]] = {
    "kill -9": _signal(signal.SIGKILL),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "hang, heartbeat alive": Sharer.hang,
}
