"""Processes that take the lease again and again, and an oracle that reads what they wrote."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Grant", "Taker", "overlaps"]

# Writes a line when it has the lease, and one before it gives it back.
_CODE = """
import os, random, sys, time
from ocgpu import Lease
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
chance = random.Random(int(sys.argv[2]))
leases = {mode: Lease(mode=mode) for mode in ("exclusive", "shared")}
while True:
    mode = "exclusive" if chance.random() < 0.7 else "shared"
    with leases[mode]:
        os.write(log, f"{mode} {time.monotonic_ns()}\\n".encode())
        time.sleep(chance.choice((0.0, 0.0, 0.0001)))
        os.write(log, f"end {time.monotonic_ns()}\\n".encode())
"""


class Grant(NamedTuple):
    """A span in which a process certainly held the lease, in nanoseconds of the machine's clock."""

    begin: int
    end: int
    mode: str
    pid: int


class Taker:
    """One such process.

    Args:
        log: Where it writes; a file of its own.
        seed: Of its choices.
    """

    def __init__(self, log: Path, seed: int) -> None:
        log.touch()
        self._log = log
        self.process = subprocess.Popen([sys.executable, "-c", _CODE, log, str(seed)])

    def count(self) -> int:
        """How many grants it has got, about."""
        return self._log.stat().st_size // 45

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self.process.kill()
        self.process.wait(20)

    def grants(self) -> list[Grant]:
        """What it held; of a hold in which it was killed the moment of its begin."""
        granted: list[Grant] = []
        for line in self._log.read_text().splitlines():
            word, _, moment = line.partition(" ")
            if word == "end":
                granted[-1] = granted[-1]._replace(end=int(moment))
            else:
                granted.append(Grant(int(moment), int(moment), word, self.process.pid))
        return granted


def overlaps(grants: Iterable[Grant]) -> list[tuple[Grant, Grant]]:
    """Pairs that held at once although one of them was exclusive."""
    ordered = sorted(grants)
    found = []
    longest: dict[str, Grant] = {}
    for grant in ordered:
        for mode, before in longest.items():
            if grant.begin < before.end and "exclusive" in (mode, grant.mode):
                found.append((before, grant))
        if grant.mode not in longest or longest[grant.mode].end < grant.end:
            longest[grant.mode] = grant
    return found
