"""Who holds the card's memory: our engines, our peers, and processes that take part in nothing.

A thread of its own looks, at most once a second, and everybody reads what it saw last. It is a
daemon: a driver that does not come back from a call must hold up neither a request nor the exit.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ocgpu.errors import OcgpuError
from ocgpu.gpu_memory import GpuMemory
from ocgpu.lease import lease_status
from ocgpu.lineage import INIT_PID
from ocgpu.occupancy import Occupancy, occupancy
from ocgpu.server.engine_processes import EngineFinder, Listeners
from ocgpu.server.metrics import Sample, family
from ocgpu.text import printable

__all__ = ["GpuProcesses"]

logger: Final = logging.getLogger("ocgpu.server")

_LOOK_SECONDS: Final = 5.0
# Whoever asks in between has it looked at again, and never sooner than this.
_REST_SECONDS: Final = 1.0
# A driver may be loaded later than we are.
_ABSENT_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 1.0
_SHOWN_MAX: Final = 16
_MIB: Final = 1 << 20
_PROC: Final = Path("/proc")


class _Outsider(NamedTuple):
    pid: int
    name: str
    memory_bytes: int | None


class _Seen(NamedTuple):
    """One look; in place of what cannot be told, None."""

    occupancy: Occupancy | None
    engines: Mapping[str, int | None]
    outside: tuple[_Outsider, ...] | None


class GpuProcesses:
    """Looks at the card while there is a driver that answers.

    Args:
        engines: Where each engine behind us listens, by name.
        gpu_key: The GPU; None when none is known, and then nobody can be called an outsider.
        peers: Gives the pids of the live peers, ours among them; called in the thread.
    """

    def __init__(
        self,
        engines: Mapping[str, str],
        gpu_key: str | None,
        peers: Callable[[], Iterable[int]],
    ) -> None:
        self._finders = {name: EngineFinder(url) for name, url in engines.items()}
        self._gpu_key = gpu_key
        self._peers = peers
        self._nothing = _Seen(None, dict.fromkeys(engines), None)
        self._seen = self._nothing
        self._told: dict[int, _Outsider] = {}
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-processes", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    async def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            # It sleeps: this takes no time, unless the driver does not answer.
            self._thread.join(_STOP_SECONDS)

    def engines(self) -> Mapping[str, int | None]:
        """Give the bytes of each engine with its descendants; None where they are not known."""
        self._wake.set()
        return self._seen.engines

    def memory_of(self, pids: Collection[int]) -> dict[int, int | None]:
        """Give the bytes of processes with their descendants; None where they are not known."""
        self._wake.set()
        seen = self._seen.occupancy
        return dict.fromkeys(pids) if seen is None else seen.by_root(pids)

    def outside(self) -> list[dict[str, Any]] | None:
        """Give the largest processes that take part in nothing; None where that is not known."""
        self._wake.set()
        outside = self._seen.outside
        return None if outside is None else [one._asdict() for one in outside[:_SHOWN_MAX]]

    def series(self) -> str:
        """Write it as metrics; what is not known is left out."""
        seen = self._seen
        self._wake.set()
        engines: list[Sample] = [
            ("", {"engine": name}, float(size))
            for name, size in seen.engines.items()
            if size is not None
        ]
        text = family("gpulock_engine_memory_bytes", "gauge", "GPU memory of an engine", engines)
        if seen.outside is None:
            return text
        count: list[Sample] = [("", {}, float(len(seen.outside)))]
        sizes = [one.memory_bytes for one in seen.outside if one.memory_bytes is not None]
        size: list[Sample] = [("", {}, float(sum(sizes)))] if sizes or not seen.outside else []
        return text + "".join(
            (
                family(
                    "gpulock_outside_processes",
                    "gauge",
                    "processes that compute on the GPU and take part in nothing",
                    count,
                ),
                family(
                    "gpulock_outside_memory_bytes",
                    "gauge",
                    "what is known of the GPU memory of those",
                    size,
                ),
            )
        )

    def _run(self) -> None:
        try:
            self._look_until_ended()
        except Exception:
            logger.exception("the processes on the gpu are looked at no more")
            self._seen = self._nothing

    def _look_until_ended(self) -> None:
        memory: GpuMemory | None = None
        while not self._ended.is_set():
            self._wake.clear()
            memory = memory or GpuMemory.open(self._gpu_key)
            if memory is None:
                self._ended.wait(_ABSENT_SECONDS)
                continue
            self._seen = self._look(memory)
            if self._seen.occupancy is None:
                # A driver that was replaced under us answers nothing to those who had the old one.
                memory.close()
                memory = None
            if not self._ended.wait(_REST_SECONDS):
                self._wake.wait(_LOOK_SECONDS - _REST_SECONDS)
        if memory is not None:
            memory.close()

    def _look(self, memory: GpuMemory) -> _Seen:
        found = occupancy(memory)
        if found.total is None and not found.occupants:
            return self._nothing
        engines = {name: finder.find() for name, finder in self._finders.items()}
        outside = self._outsiders(found, engines.values())
        if outside is not None:
            self._tell(outside, found)
        return _Seen(found, _engine_memory(found, engines), outside)

    def _outsiders(
        self, found: Occupancy, engines: Iterable[Listeners]
    ) -> tuple[_Outsider, ...] | None:
        """Give those that take part in nothing, the largest first."""
        if self._gpu_key is None:
            return None
        candidates = [one for one in found.occupants if one.computes and one.lineage]
        if not candidates:
            return () if found.whole else None
        holders = _lease_pids(self._gpu_key)
        engines = tuple(engines)
        uids = frozenset(uid for engine in engines for uid in engine.uids)
        inside = {*self._peers(), *(pid for pid in holders if pid is not None)}
        candidates = [one for one in candidates if inside.isdisjoint(one.inner)]
        inside.discard(INIT_PID)
        inside.update(pid for engine in engines for pid in engine.pids)
        outside = [one for one in candidates if inside.isdisjoint(one.lineage)]
        # One that holds the lease under no name may be any of them, except those known before.
        if None in holders:
            outside = [one for one in outside if one.pid in self._told]
        described = [_Outsider(one.pid, _name(one.pid), one.memory_bytes) for one in outside]
        if uids:
            described = [one for one in described if _uid(one.pid) not in uids]
        return tuple(sorted(described, key=lambda one: -(one.memory_bytes or 0)))

    def _tell(self, outside: tuple[_Outsider, ...], found: Occupancy) -> None:
        """Log who came and who is gone."""
        present = {one.pid for one in found.occupants}
        now = {one.pid: one for one in outside}
        if not found.whole:
            # Who is not listed may be there.
            now |= {pid: one for pid, one in self._told.items() if pid not in present}
        for one in [one for pid, one in now.items() if pid not in self._told][:_SHOWN_MAX]:
            logger.warning("a process that takes part in nothing is on the gpu", extra=_fields(one))
        for one in [one for pid, one in self._told.items() if pid not in now][:_SHOWN_MAX]:
            how = "takes part now" if one.pid in present else "is gone"
            logger.info("the process outside %s", how, extra=_fields(one))
        self._told = now


def _engine_memory(found: Occupancy, engines: Mapping[str, Listeners]) -> dict[str, int | None]:
    known = found.by_root({pid for engine in engines.values() for pid in engine.pids})
    memory: dict[str, int | None] = {}
    for name, engine in engines.items():
        sizes = [None if pid == INIT_PID else known[pid] for pid in engine.pids]
        told = [size for size in sizes if size is not None]
        memory[name] = sum(told) if sizes and len(told) == len(sizes) else None
    return memory


def _lease_pids(gpu_key: str) -> set[int | None]:
    """Give who holds the lease or waits for it; None among them is an unknown holder."""
    try:
        status = lease_status(gpu_key)
    except (OcgpuError, OSError):
        return {None}
    holders = {party.pid for party in status.holders}
    waiters = {party.pid for party in status.waiters if party.pid is not None}
    return {*holders, *waiters, *((None,) if status.held and not holders else ())}


def _fields(one: _Outsider) -> dict[str, Any]:
    size = None if one.memory_bytes is None else one.memory_bytes // _MIB
    return {"program": one.name, "pid": one.pid, "memory_mib": size}


def _name(pid: int) -> str:
    try:
        return printable((_PROC / str(pid) / "comm").read_text(errors="replace").rstrip("\n"))
    except OSError:
        return "?"


def _uid(pid: int) -> int | None:
    try:
        return (_PROC / str(pid)).stat().st_uid
    except OSError:
        return None
