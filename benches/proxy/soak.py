"""What requests and aborted streams leave behind in the proxy: memory and descriptors."""

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from tests.waiting import wait_until

from benches.proxy.rows import GET, POST
from benches.proxy.targets import OCGPU, POOLED, Bench

__all__ = ["TITLE", "Soak", "soak"]

REQUESTS, STREAMS, BATCH = 100_000, 6_000, 250
WARM_UP = (0.1, 0.25)
"""Parts of the requests and of the streams: every buffer, cache and pool is there after them."""
QUARTERS = 4
GROWTH_MB = 1.0
QUIET_SECONDS = 1.0
WATCHDOG_SECONDS = 300.0
TITLE = f"{REQUESTS:,} requests (a fifth locked POSTs) and {STREAMS:,} aborted streams"


@dataclass(frozen=True)
class Left:
    """What the proxy has when nothing is in flight: megabytes of RSS, and descriptors."""

    megabytes: float
    descriptors: int


@dataclass(frozen=True)
class Soak:
    """What was left after the warm-up and after each quarter of the soak."""

    left: list[Left]

    def cells(self) -> tuple[str, str]:
        """What the table says: of the proxy, and against the bar."""
        memory = " to ".join(f"{left.megabytes:.1f}" for left in self.left)
        descriptors = " to ".join(str(left.descriptors) for left in self.left)
        growth = self.left[-1].megabytes - self.left[0].megabytes
        more = self.left[-1].descriptors - self.left[0].descriptors
        verdicts = (
            f"<= {GROWTH_MB:g} MB more: {growth:+.1f}, {_verdict(met=growth <= GROWTH_MB)}",
            f"<= 0 descriptors more: {more:+d}, {_verdict(met=more <= 0)}",
        )
        return f"RSS {memory} MB, {descriptors} descriptors", "; ".join(verdicts)


def soak(bench: Bench) -> Soak:
    """Warm up, then soak in quarters; look each time when nothing is in flight.

    Raises:
        CalledProcessError: The load failed, and says why on stderr.
    """
    _mix(bench, *WARM_UP)
    left = [_left(bench)]
    for _ in range(QUARTERS):
        _mix(bench, 1 / QUARTERS, 1 / QUARTERS)
        left.append(_left(bench))
    return Soak(left)


def _mix(bench: Bench, of_requests: float, of_streams: float) -> None:
    requests = int(REQUESTS * of_requests)
    _load(bench, "requests", *GET, "--connections", "64", "--count", str(requests * 4 // 5))
    _load(bench, "requests", *POST, "--connections", "16", "--count", str(requests // 5))
    for _ in range(int(STREAMS * of_streams / BATCH)):
        _load(bench, "cut", "--streams", str(BATCH), "--rate", "20")


def _load(bench: Bench, mode: str, *options: str) -> None:
    port = bench.target(OCGPU).ports[POOLED]
    where = ("--port", str(port), "--upstream", str(bench.upstream), "--pid", "0")
    until = ("--warm-up", "0", "--seconds", str(WATCHDOG_SECONDS))
    ran = subprocess.run(
        [bench.load, mode, *options, *where, *until], capture_output=True, text=True, check=True
    )
    faults = json.loads(ran.stdout).get("faults", 0)
    if faults:
        raise ValueError(f"{faults} faults")


def _left(bench: Bench) -> Left:
    """What is left once the upstream closed what was idle, and the proxy saw it."""
    pid, port = bench.target(OCGPU).pid, bench.target(OCGPU).ports[POOLED]
    wait_until(lambda: _in_flight(port) == 0, WATCHDOG_SECONDS, "nothing in flight")
    # A look at `/healthz` makes the proxy ask its upstreams: those connections are kept as well.
    _quiet(pid)
    with urlopen(f"http://127.0.0.1:{bench.upstream}/bench/close-idle", timeout=5) as reply:
        assert reply.status == 200
    return Left(_megabytes(pid), _quiet(pid))


def _quiet(pid: int) -> int:
    """Descriptors, once their number rests."""
    last, since = _descriptors(pid), time.monotonic()
    while time.monotonic() - since < QUIET_SECONDS:
        time.sleep(0.05)
        if (now := _descriptors(pid)) != last:
            last, since = now, time.monotonic()
    return last


def _in_flight(port: int) -> int:
    with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as reply:
        return int(json.load(reply)["llm_inflight"])


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def _verdict(*, met: bool) -> str:
    return "met" if met else "**missed**"
