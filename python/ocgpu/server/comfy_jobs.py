"""The jobs in ComfyUI's queue, ours and others': waited for, counted, and given up once.

Jobs that reached ComfyUI past the proxy are waited for before a job of ours goes out: it would only
queue behind them, with its own time-out running.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Final, Literal

from ocgpu.server.engines.comfy_documents import JobResult, Queue
from ocgpu.server.engines.comfyui import ComfyUI
from ocgpu.server.engines.following import follow, wait_for_queue, wait_until_gone
from ocgpu.server.metrics import Metrics
from ocgpu.server.relay.upstream import UpstreamConnectError, UpstreamError

__all__ = ["ComfyJobs"]

logger: Final = logging.getLogger("ocgpu.server")

# One that is busy answers later; one that is gone refuses at once.
_REACH_SECONDS: Final = 1.0
# Ids in one line of the log.
_NAMED: Final = 10


class ComfyJobs:
    """What one ComfyUI works on.

    Args:
        comfyui: The engine; None when there is none, and then there are no jobs.
        metrics: Takes results.
        timeout: Seconds that a job may take.
        action: What becomes of a job that takes longer.
    """

    def __init__(
        self,
        comfyui: ComfyUI | None,
        metrics: Metrics,
        timeout: float,
        action: Literal["release", "interrupt"],
    ) -> None:
        self._comfyui = comfyui
        self._metrics = metrics
        self._timeout = timeout
        self._action = action
        # Jobs that were still there when their time was over: nobody waits for them twice.
        self._given_up: set[str] = set()

    async def reach(self) -> None:
        """See that ComfyUI is there, before models are unloaded for it.

        Raises:
            UpstreamConnectError: It is not.
        """
        if self._comfyui is None:
            return
        try:
            await self._comfyui.queue(timeout=_REACH_SECONDS)
        except UpstreamConnectError:
            raise
        except UpstreamError:
            # Busy is not gone.
            return

    async def wait_for_others(self) -> None:
        """Wait for jobs that others queued before ours; those that come meanwhile, ours joins."""
        if self._comfyui is None:
            return
        try:
            others = self._strangers(await self._comfyui.queue())
        except UpstreamError as error:
            logger.debug("no look for others' image jobs: %s", error)
            return
        if not others:
            return
        fields = {"jobs": len(others), "prompt_ids": others[:_NAMED]}
        logger.warning("image job: waits for jobs that came past the proxy", extra=fields)
        timeout = self._timeout
        if not await wait_until_gone(self._comfyui, others, timeout):
            self._given_up.update(others)
            logger.warning("image job: they are still there after %gs", timeout, extra=fields)

    async def follow_strangers(self, *, patient: bool = True) -> bool:
        """Wait for every job that ComfyUI knows of, when we do not know which is ours.

        Args:
            patient: Ask until ComfyUI says which these are, and not only once.

        Returns:
            Whether there was one.
        """
        if self._comfyui is None:
            return False
        queue: Queue | None = None
        if patient:
            queue = await wait_for_queue(self._comfyui, self._timeout)
        else:
            with contextlib.suppress(UpstreamError):
                queue = await self._comfyui.queue()
        found = [] if queue is None else self._strangers(queue)
        await self.follow_all(found)
        return bool(found)

    async def follow_all(self, prompt_ids: Sequence[str]) -> None:
        """Wait for the end of jobs that we did not send, or do not know that we did."""
        for prompt_id in prompt_ids:
            logger.info("image job: adopted", extra={"prompt_id": prompt_id})
            await self.follow(prompt_id)

    def _strangers(self, queue: Queue) -> list[str]:
        """Give the jobs of a queue that are worth waiting for: not those that outlasted a wait."""
        self._given_up.intersection_update(queue.ids)
        return [prompt_id for prompt_id in queue.ids if prompt_id not in self._given_up]

    async def follow(self, prompt_id: str) -> JobResult:
        """Wait for the end of a job and count it."""
        if self._comfyui is None:
            raise RuntimeError("no ComfyUI to follow a job in")
        began = time.monotonic()
        result = await follow(self._comfyui, prompt_id, self._timeout, self._action)
        if result is JobResult.TIMEOUT:
            self._given_up.add(prompt_id)
        self._metrics.image_jobs[result] += 1
        level = logging.INFO if result in (JobResult.DONE, JobResult.ERROR) else logging.WARNING
        seconds = round(time.monotonic() - began, 3)
        fields = {"prompt_id": prompt_id, "seconds": seconds}
        logger.log(level, "image job: %s", result.value, extra=fields)
        return result
