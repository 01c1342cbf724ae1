"""Waiting for jobs in ComfyUI: until one has really ended, or it is sure that nobody will say.

What silence means: nobody at the port is a restart, which forgets every job; no route or no
answer of ComfyUI's form is a machine or a gateway that nobody will repair within seconds; an
answer that takes long is a ComfyUI that computes, and is waited for as long as the job may take.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, TypeVar

from ocgpu.server.engines.comfy_documents import JobResult, Queue
from ocgpu.server.engines.comfyui import ComfyUI, UnreadableError
from ocgpu.server.relay.upstream import (
    UpstreamConnectError,
    UpstreamError,
    UpstreamRefusedError,
)

__all__ = ["LostError", "follow", "wait_for_queue", "wait_until_gone"]

T = TypeVar("T")

logger: Final = logging.getLogger("ocgpu.server")

# The first looks come early, for a job whose nodes are all cached ends within milliseconds.
_POLL_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
# A restart takes some 5 s; after this long with nobody at the port, no job is running there.
_REFUSED_SECONDS: Final = 30.0
# A gateway's error page, a machine that is off: it may come back, the job hardly.
_UNREADABLE_SECONDS: Final = 60.0
# An interrupted job ends at its next node or sampling step.
_INTERRUPT_SECONDS: Final = 10.0


class LostError(Exception):
    """ComfyUI is not there, or answers nothing that can be read, for too long."""


async def follow(
    comfyui: ComfyUI, prompt_id: str, timeout: float, action: Literal["release", "interrupt"]
) -> JobResult:
    """Wait until a job has ended.

    Args:
        comfyui: Where it is.
        prompt_id: Its id.
        timeout: Seconds; then `action` decides about a job that is still there.
        action: `interrupt` ends the job in ComfyUI, `release` leaves it.
    """

    async def look() -> JobResult | None:
        return await _look(comfyui, prompt_id)

    fields = {"prompt_id": prompt_id, "action": action}
    try:
        result = await _poll(look, timeout)
        if result is not None:
            return result
        logger.warning("image job: still there after %gs", timeout, extra=fields)
        if action == "interrupt":
            await comfyui.cancel(prompt_id)
            if await _poll(look, _INTERRUPT_SECONDS) is None:
                logger.warning("image job: it goes on in spite of the interrupt", extra=fields)
    except LostError as error:
        logger.warning("image job: %s", error, extra=fields)
        return JobResult.LOST
    return JobResult.TIMEOUT


async def wait_until_gone(comfyui: ComfyUI, prompt_ids: Sequence[str], timeout: float) -> bool:
    """Wait until none of some jobs waits or runs; False after `timeout` seconds."""

    async def look() -> bool | None:
        queued = (await comfyui.queue()).ids
        return None if any(prompt_id in queued for prompt_id in prompt_ids) else True

    try:
        return await _poll(look, timeout) is True
    except LostError:
        return True


async def wait_for_queue(comfyui: ComfyUI, timeout: float) -> Queue | None:
    """Ask for the queue until ComfyUI says; None when it is gone or `timeout` seconds passed."""
    try:
        return await _poll(comfyui.queue, timeout)
    except LostError:
        return None


async def _look(comfyui: ComfyUI, prompt_id: str) -> JobResult | None:
    """Look once; None while the job waits or runs."""
    absent: JobResult | None = JobResult.LOST
    try:
        if prompt_id in (await comfyui.queue()).ids:
            return None
    except UnreadableError:
        # The history alone tells an end as well, only not that a job is gone.
        absent = None
    return await comfyui.outcome(prompt_id) or absent


async def _poll(look: Callable[[], Awaitable[T | None]], timeout: float) -> T | None:
    """Look until there is something; None after `timeout` seconds.

    Raises:
        LostError: There is nobody to ask any more.
    """
    deadline = time.monotonic() + timeout
    silence = _Silence()
    looks = 0
    while True:
        found: T | None = None
        try:
            found = await look()
        except UpstreamError as error:
            silence.note(error)
        else:
            silence.end()
        left = deadline - time.monotonic()
        if found is not None or left <= 0:
            return found
        await asyncio.sleep(min(_POLL_SECONDS[min(looks, len(_POLL_SECONDS) - 1)], left))
        looks += 1


class _Silence:
    """How long ComfyUI has said nothing, and when that is too long."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._told = False

    def end(self) -> None:
        """It has answered."""
        self._since, self._told = None, False

    def note(self, error: UpstreamError) -> None:
        """It has not.

        Raises:
            LostError: For too long.
        """
        logger.log(logging.DEBUG if self._told else logging.WARNING, "image job: %s", error)
        self._told = True
        bound = _bound(error)
        if bound is None:
            self._since = None
            return
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since >= bound:
            raise LostError(f"given up after {bound:g}s: {error}")


def _bound(error: UpstreamError) -> float | None:
    """Give the seconds that such an error may last; None for no bound: somebody is there."""
    if isinstance(error, UpstreamRefusedError):
        return _REFUSED_SECONDS
    if isinstance(error, UpstreamConnectError | UnreadableError):
        return _UNREADABLE_SECONDS
    return None
