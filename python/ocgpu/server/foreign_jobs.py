"""Image jobs that went into ComfyUI past the proxy: they render whatever the lock says."""

import asyncio
import logging
from typing import Final

from ocgpu.server.admission import Admission
from ocgpu.server.arbiter import State
from ocgpu.server.engines.comfyui import ComfyUI
from ocgpu.server.metrics import Sample, family
from ocgpu.server.relay.upstream import UpstreamError

__all__ = ["ForeignJobs"]

logger: Final = logging.getLogger("ocgpu.server")

_LOOK_SECONDS: Final = 5.0


class ForeignJobs:
    """Looks at ComfyUI's queue while none of our own jobs can be in it.

    Args:
        admission: Says when that is.
        comfyui: None when there is none.

    Attributes:
        count: How many there were at the last look; None while nobody knows.
    """

    def __init__(self, admission: Admission, comfyui: ComfyUI | None) -> None:
        self._admission = admission
        self._comfyui = comfyui
        self._task: asyncio.Task[None] | None = None
        self.count: int | None = None

    def start(self) -> None:
        """Begin to look."""
        if self._comfyui is not None:
            self._task = asyncio.ensure_future(self._run(self._comfyui))

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def series(self) -> str:
        """Give the gauge; no sample while nobody knows."""
        known: list[Sample] = [] if self.count is None else [("", {}, float(self.count))]
        meaning = "image jobs that went into ComfyUI past the proxy"
        return family("gpulock_outside_image_jobs", "gauge", meaning, known)

    async def _run(self, comfyui: ComfyUI) -> None:
        while True:
            self._note(await self._look(comfyui))
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self, comfyui: ComfyUI) -> int | None:
        before = self._admission.granted
        if self._admission.counts.state is State.IMAGE:
            return None
        try:
            found = await comfyui.remaining()
        except UpstreamError:
            return None
        # What was granted meanwhile may be an image, and its job one of these.
        return found if self._admission.granted == before else None

    def _note(self, found: int | None) -> None:
        before, self.count = self.count or 0, found
        if found and not before:
            logger.warning("image jobs went in past the proxy", extra={"jobs": found})
        elif found == 0 and before:
            logger.info("no image job past the proxy any more")
