"""The card emptied: for somebody outside who waits for the lease, by hand, or because it is empty.

An eviction takes the lock like an image and ahead of all that wait: what runs ends first, and who
comes later waits behind it. Then nothing of ours is on the card, the lease is given up, and the
next request queues for it behind whoever came before.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from ocgpu.server.admission import Admission
from ocgpu.server.arbiter import Kind, State
from ocgpu.server.engines.ollama import Ollama
from ocgpu.server.freeing import Freeing
from ocgpu.server.refusal import RefusedError
from ocgpu.server.relay.upstream import UpstreamConnectError, UpstreamError
from ocgpu.server.residency import Residency
from ocgpu.server.warm_up import warm_up

__all__ = ["Evictions"]

logger: Final = logging.getLogger("ocgpu.server")

# How often an idle card is looked at, whose last model may have left by itself.
_LOOK_SECONDS: Final = 5.0
_CALL_SECONDS: Final = 4.0
# How often a warm model that waits looks whether the card is free.
_AGAIN_SECONDS: Final = 1.0


class Evictions:
    """Empties the card and gives up the lease. To be made inside a running loop.

    Args:
        admission: The lock.
        residency: The lease.
        card: Frees the card of either engine.
        ollama: Says what is resident; None when there is none.
        warm_model: Loaded again when whoever was outside has gone; "" is none.
        unload_timeout: Seconds that an eviction by hand waits for the lock.
    """

    def __init__(
        self,
        admission: Admission,
        residency: Residency,
        card: Freeing,
        ollama: Ollama | None,
        *,
        warm_model: str,
        unload_timeout: float,
    ) -> None:
        self._admission = admission
        self._residency = residency
        self._card = card
        self._ollama = ollama
        self._warm_model = warm_model
        self._unload_timeout = unload_timeout
        self._tasks: set[asyncio.Task[None]] = set()
        residency.on_wanted = lambda: self._spawn(self._make_way())

    def start(self) -> None:
        """Begin to look at what is resident without a request of ours, or no more."""
        if self._ollama is not None and self._residency.enabled:
            self._spawn(self._look_after(self._ollama))

    async def by_hand(self) -> dict[str, Any]:
        """Evict everything from the card; wait for what runs to end first.

        Raises:
            RefusedError: What runs did not end within the unload time-out, or we shut down.
        """
        if self._is_somebody_elses():
            return await self._empty()
        grant = await self._admission.acquire(Kind.EVICTION, timeout=self._unload_timeout)
        with grant:
            return await self._empty()

    async def _empty(self) -> dict[str, Any]:
        models, _ = await self._card.unload_models()
        freed = await self._card.free_images()
        if self._is_idle() or self._admission.counts.evicting:
            self._residency.give_up()
        return {"unloaded": models, "comfyui_freed": freed}

    def _is_somebody_elses(self) -> bool:
        """Whether somebody outside has the card: what we let in waits for it, and runs not."""
        counts = self._admission.counts
        waits = counts.waiting_llm or counts.waiting_image
        return bool(waits) and self._is_idle() and self._residency.mode is None

    async def close(self) -> None:
        """End what goes on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("eviction failed", exc_info=task.exception())

    async def _make_way(self) -> None:
        """Give the card to whoever waits for it outside."""
        try:
            grant = await self._admission.acquire(Kind.EVICTION)
        except RefusedError:
            return  # The end of the process gives the lease up.
        with grant:
            # After an image it was given up already.
            if self._residency.mode is not None:
                models, empty = await self._card.unload_models()
                self._residency.give_up()
                fields = {"models": models, "empty": empty}
                logger.info("card: made way for another process", extra=fields)
        if self._warm_model and self._ollama is not None:
            await self._warm_again(self._ollama)

    async def _warm_again(self, ollama: Ollama) -> None:
        """Load the warm model once nobody outside has the card, unless a request comes before.

        It has no place in the lease's queue: it would go before an image that waits there.
        """
        while not self._residency.try_share():
            await asyncio.sleep(_AGAIN_SECONDS)
            counts = self._admission.counts
            if counts.waiting_llm or counts.waiting_image or counts.state is not State.IDLE:
                return
        await warm_up(self._admission, ollama, self._warm_model)

    async def _look_after(self, ollama: Ollama) -> None:
        """Hold the lease while models are resident, and give it up when the last one has left."""
        if await self._resident(ollama, unknown=False):
            self._residency.try_share()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._residency.mode is None and self._is_idle():
                # Loaded past the proxy, or back with an engine that was restarted.
                if await self._resident(ollama, unknown=False):
                    self._residency.try_share()
            elif self._residency.mode == "shared" and self._is_idle():
                before = self._admission.granted
                resident = await self._resident(ollama, unknown=True)
                untouched = self._admission.granted == before and self._is_idle()
                if not resident and untouched and self._residency.mode == "shared":
                    self._residency.give_up()

    def _is_idle(self) -> bool:
        counts = self._admission.counts
        return counts.state is State.IDLE and not counts.evicting

    async def _resident(self, ollama: Ollama, *, unknown: bool) -> bool:
        """Whether models are on the card; `unknown` where an Ollama that is there does not say."""
        try:
            return bool(await ollama.loaded(timeout=_CALL_SECONDS))
        except UpstreamConnectError:
            return False
        except UpstreamError:
            return unknown
