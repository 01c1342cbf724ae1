"""Under which conditions something was measured: the machine, and who else used the core."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CoreUse", "Meter", "load", "machine", "preference", "preferred"]

AUTOGROUP = Path("/proc/self/autogroup")
FIRST = -19


@dataclass(frozen=True)
class CoreUse:
    """Where the time of the core went, in parts of the span.

    Attributes:
        workers: To the workers that are measured.
        idle: To nobody.
        steal: To other machines of the host.
        others: To other processes of this machine, and the kernel's own work.
    """

    workers: float
    idle: float
    steal: float
    others: float


class Meter:
    """Reads a core's clock and the workers' at both ends of a span."""

    def __init__(self, core: int, pids: list[int]) -> None:
        self._core = core
        self._pids = pids
        self._before = self._read()

    def use(self) -> CoreUse:
        """Where the time went since this was made."""
        idle, steal, total, workers = (
            late - early for early, late in zip(self._before, self._read(), strict=True)
        )
        busy, free, gone = (ticks / max(1, total) for ticks in (workers, idle, steal))
        return CoreUse(workers=busy, idle=free, steal=gone, others=1.0 - busy - free - gone)

    def _read(self) -> tuple[int, int, int, int]:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith(f"cpu{self._core} "))
        # user, nice, system, idle, iowait, irq, softirq, steal; guest time is within user.
        fields = [int(field) for field in line.split()[1:9]]
        return fields[3] + fields[4], fields[7], sum(fields), sum(map(_ticks_of, self._pids))


def load() -> tuple[float, float, float]:
    """The load averages of 1, 5 and 15 minutes."""
    return os.getloadavg()


def machine() -> dict[str, str]:
    """What was measured on."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.split(":")[1] for line in cpuinfo.splitlines() if line.startswith("model name")]
    return {
        "cores": str(os.cpu_count()),
        "processor": names[0].strip() if names else platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


@contextmanager
def preferred() -> Iterator[None]:
    """Prefer this process and its children to others inside.

    Where the kernel groups processes by session, niceness counts within the session only, and the
    session has one of its own.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0), _session_niceness()
    _prefer(FIRST, FIRST)
    try:
        yield
    finally:
        _prefer(*before)


def preference() -> str:
    """How this process and its session stand to others, 0 being usual and -20 the most."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    return f"niceness {own}, of the session {_session_niceness()}"


def _prefer(own: int, session: int | None) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, own)
    if AUTOGROUP.exists() and session is not None:
        AUTOGROUP.write_text(str(session), encoding="ascii")


def _session_niceness() -> int | None:
    # `/autogroup-25 nice 0`; absent where the kernel does not group.
    return int(AUTOGROUP.read_text(encoding="ascii").split()[-1]) if AUTOGROUP.exists() else None


def _ticks_of(pid: int) -> int:
    # After the name, which may hold anything, the 12th and 13th field are user and system time.
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(stat[11]) + int(stat[12])
