"""Freed means measured: an engine is waited for until its memory is seen to be free.

Ollama's empty `/api/ps` and ComfyUI's answer to `/free` both come before the memory is back. What
is measured is the memory of the engine's processes, by NVML; where the driver does not tell it by
process (Windows' driver model, a container that does not see the pids), it is the card's. With a
remote engine or without NVML nothing is measured and nothing waits.

ComfyUI's own `/system_stats` is no source: its `vram_free` counts what torch has cached as free,
which no other process can have.
"""

import asyncio
import logging
import threading
import time
from typing import Final

from ocgpu.device import GpuMemory
from ocgpu.server.engine_processes import is_descendant, listening_pids, local_addresses
from ocgpu.server.metrics import Metrics
from ocgpu.server.relay.address import Address

__all__ = ["Fall", "Settler", "Settling"]

logger: Final = logging.getLogger("ocgpu.server")

_MIB: Final = 1 << 20
_LOOK_SECONDS: Final = 0.05
# Freed: what is left of what was there.
_LEFT_SHARE: Final = 0.05
# An engine frees in a few steps within milliseconds; after this long without one, that was all.
_STEADY_SECONDS: Final = 0.3
_STEADY_BYTES: Final = 32 * _MIB
# On a card whose processes we cannot tell apart, a fall that did not begin by now may be none.
_PATIENCE_SECONDS: Final = 2.0
# What a driver takes for itself on the largest cards.
_UNSEEN_BYTES: Final = 1024 * _MIB
_CARD_FALL_BYTES: Final = 256 * _MIB


class Fall:
    """Decides, from the bytes in use over time, when what was to be freed is free.

    Args:
        before: Bytes in use before.
        floor: Bytes that are as good as nothing.
        enough: A fall by so many bytes, and a rest after it, is the end as well: engines keep some.
        patience: Seconds to wait for a fall to begin.
    """

    def __init__(self, before: int, *, floor: float, enough: float, patience: float) -> None:
        self._before = before
        self._floor = floor
        self._enough = enough
        self._patience = patience
        self._rest = before
        self._rest_since = 0.0

    def is_over(self, seconds: float, used: int) -> bool:
        """Whether there is nothing left to wait for.

        Args:
            seconds: Since the engine was told to free.
            used: Bytes in use now.
        """
        if used <= self._floor:
            return True
        if abs(used - self._rest) > _STEADY_BYTES:
            self._rest, self._rest_since = used, seconds
        if self.has_fallen(used):
            return seconds - self._rest_since >= _STEADY_SECONDS
        return seconds >= self._patience

    def has_fallen(self, used: int) -> bool:
        """Whether so much is free that the rest may be what the engine keeps."""
        return used <= self._floor or self._before - used >= self._enough


class Settler:
    """Measures before an engine is told to free its memory, and waits afterwards.

    Args:
        timeout: Seconds to wait at most; 0 measures nothing.
        metrics: Takes the seconds.
    """

    def __init__(self, timeout: float, metrics: Metrics) -> None:
        self._timeout = timeout
        self._metrics = metrics

    async def begin(self, name: str, url: str, kept: int = 0) -> "Settling":
        """Measure an engine before it frees.

        Args:
            name: The engine, for the log.
            url: Where it listens.
            kept: Bytes that its process keeps for as long as it lives.
        """
        sight = _Sight(url)
        settling = Settling(name, sight, self._timeout, kept, self._metrics)
        if self._timeout:
            try:
                await asyncio.to_thread(sight.open)
            except BaseException:
                settling.close()
                raise
        return settling


class Settling:
    """One engine between what it held and what it holds."""

    def __init__(
        self, name: str, sight: "_Sight", timeout: float, kept: int, metrics: Metrics
    ) -> None:
        self._name = name
        self._sight = sight
        self._timeout = timeout
        self._kept = kept
        self._metrics = metrics

    async def wait(self, *, told: bool) -> bool:
        """Wait until the memory is free, or no more; False when it was seen to stay.

        Args:
            told: Whether the engine was told to free something.
        """
        before = self._sight.before
        if before is None or before <= self._floor(before):
            return True
        if self._sight.whole_card and not told:
            # What is in use is anybody's.
            return True
        fall = self._fall(before)
        began = time.monotonic()
        while True:
            used = await asyncio.to_thread(self._sight.read)
            seconds = time.monotonic() - began
            if used is None or seconds >= self._timeout or fall.is_over(seconds, used):
                break
            await asyncio.sleep(_LOOK_SECONDS)
        if used is None:
            return True
        return self._report(before, used, seconds, fallen=fall.has_fallen(used))

    def close(self) -> None:
        """Look no more; any number of times."""
        # Not waited for: it is the driver's time, and the loop has nothing to learn from it.
        asyncio.get_running_loop().run_in_executor(None, self._sight.close)

    def _floor(self, before: int) -> float:
        return 0.0 if self._sight.whole_card else max(before * _LEFT_SHARE, self._kept)

    def _fall(self, before: int) -> Fall:
        if self._sight.whole_card:
            patience = min(_PATIENCE_SECONDS, self._timeout)
            return Fall(before, floor=0, enough=_CARD_FALL_BYTES, patience=patience)
        floor = self._floor(before)
        return Fall(before, floor=floor, enough=before / 2, patience=self._timeout)

    def _report(self, before: int, used: int, seconds: float, *, fallen: bool) -> bool:
        self._metrics.settle.observe(seconds)
        fields = {
            "engine": self._name,
            "before_mib": before // _MIB,
            "after_mib": used // _MIB,
            "seconds": round(seconds, 3),
            "of": "card" if self._sight.whole_card else "processes",
        }
        # Of a whole card it is not known whether there was anything to free.
        if fallen or self._sight.whole_card:
            logger.info("memory settled", extra=fields)
            return True
        logger.warning("memory was not freed, going on", extra=fields)
        return False


class _Sight:
    """What can be seen of one engine's memory. Not for the event loop.

    Attributes:
        before: Bytes at the first look; None when nothing can be seen.
        whole_card: Whether these are of all processes.
    """

    def __init__(self, url: str) -> None:
        self.before: int | None = None
        self.whole_card = False
        self._url = url
        self._lock = threading.Lock()
        self._closed = False
        self._pids: frozenset[int] = frozenset()
        self._memory: GpuMemory | None = None

    def open(self) -> None:
        """Find the engine and look for the first time."""
        with self._lock:
            if not self._closed:
                self._open()

    def read(self) -> int | None:
        """Give the bytes in use now; None when they cannot be told any more."""
        memory = self._memory
        if memory is None:
            return None
        return memory.read()[1] if self.whole_card else self._of_processes()

    def close(self) -> None:
        """Look no more."""
        # Whoever gave up may do so while another thread opens: this comes after that, or before.
        with self._lock:
            self._closed = True
            memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _open(self) -> None:
        address = Address.parse(self._url)
        addresses = local_addresses(address.host)
        if not addresses:
            return
        self._memory = GpuMemory.open()
        if self._memory is None:
            return
        self._pids = listening_pids(addresses, address.port)
        self.before = self._of_processes()
        if self.before is None:
            self.whole_card = True
            self.before = self.read()

    def _of_processes(self) -> int | None:
        memory = self._memory
        if memory is None or not self._pids:
            return None
        by_pid, total = memory.read()
        if total is None:
            return None
        used = 0
        # No process at all on a card that is in use: they are hidden from us.
        seen = not by_pid and total < _UNSEEN_BYTES
        for pid, size in by_pid.items():
            ours = is_descendant(pid, self._pids)
            seen = seen or ours is not None
            if ours and size is None:
                return None
            used += (size or 0) if ours else 0
        return used if seen else None
