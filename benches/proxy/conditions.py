"""Under which conditions something was measured: versions, load, and who else used the cores."""

import os
import resource
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from benches.proxy.programs import find, first_line
from benches.sharing.conditions import load, machine

__all__ = ["CoresUse", "load_text", "versions"]

PACKAGES = ("granian", "uvloop", "httptools", "aiohttp", "litestar")


def versions() -> dict[str, str]:
    """What was measured on and with."""
    found = {**machine(), "packages": ", ".join(f"{name} {version(name)}" for name in PACKAGES)}
    for program, argument in (("nginx", "-v"), ("go", "version")):
        if path := find(program):
            found[program] = first_line(path, argument)
    return found


def load_text() -> str:
    """The load averages of 1, 5 and 15 minutes."""
    return " / ".join(f"{average:.2f}" for average in load())


class CoresUse:
    """Reads the cores' clock and that of our processes at both ends of a span.

    Args:
        pids: Our processes, besides this one and its children that have ended.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._before = self._read()

    def text(self) -> str:
        """Where the time of all cores went since this was made."""
        took = [late - early for early, late in zip(self._before, self._read(), strict=True)]
        total, idle, steal, ours = took
        others = max(0.0, total - idle - steal - ours)
        parts = {
            "this benchmark": ours,
            "others and the kernel": others,
            "steal": steal,
            "idle": idle,
        }
        return ", ".join(f"{name} {100 * part / total:.1f} %" for name, part in parts.items())

    def _read(self) -> tuple[float, float, float, float]:
        line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        # user, nice, system, idle, iowait, irq, softirq, steal; guest time is within user.
        fields = [int(field) / os.sysconf("SC_CLK_TCK") for field in line.split()[1:9]]
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        ours = time.process_time() + children.ru_utime + children.ru_stime
        return (
            sum(fields),
            fields[3] + fields[4],
            fields[7],
            ours + sum(map(cpu_seconds, self._pids)),
        )


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU that a process has used, all its threads together; 0 when it is gone."""
    with suppress(OSError):
        # clock_getcpuclockid(3): the clock of a process is made of its number so.
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0
