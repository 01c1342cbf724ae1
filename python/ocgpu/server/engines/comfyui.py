"""ComfyUI: its routes, its Host rule, and when one of its jobs has really ended.

Facts of real runs that this rests on: `/queue` and `/history` change under one mutex, so an id that
is absent from `/queue` and then from `/history` is gone for good (deleted, wiped, or lost in a
restart); an id that was used before shows its old history while the new run goes on, so `/queue` is
looked at first; `/free` only sets flags, and a job that runs is never touched by it.
"""

import asyncio
import logging
import time
from enum import StrEnum
from typing import Final, Literal, NamedTuple
from urllib.parse import quote

from ocgpu.server.arbiter import Kind
from ocgpu.server.relay.asgi import Headers
from ocgpu.server.relay.control import Control
from ocgpu.server.relay.upstream import UpstreamError, UpstreamRefusedError
from ocgpu.server.routes import RouteTable

__all__ = ["ComfyUI", "JobResult", "Queue"]

logger: Final = logging.getLogger("ocgpu.server")

ROUTES: Final = RouteTable(exact={"/prompt": Kind.IMAGE, "/api/prompt": Kind.IMAGE})

# The first looks come early, for a job whose nodes are all cached ends within milliseconds.
_POLL_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
# A garbage collection in ComfyUI's worker stalls its HTTP for a quarter of a second.
_CALL_SECONDS: Final = 10.0
_PROBE_SECONDS: Final = 3.0
# A restart takes some 5 s; after this long with nobody at the port, no job is running there.
_REFUSED_SECONDS: Final = 30.0
# An interrupted job ends at its next node or sampling step.
_INTERRUPT_SECONDS: Final = 10.0


class JobResult(StrEnum):
    """How an image job ended."""

    DONE = "done"
    ERROR = "error"
    INTERRUPTED = "interrupted"
    LOST = "lost"
    TIMEOUT = "timeout"


class Queue(NamedTuple):
    """Ids of jobs that run and that wait."""

    running: list[str]
    pending: list[str]


class ComfyUI:
    """One ComfyUI behind the proxy.

    Args:
        control: Calls to it.
    """

    name: Final = "comfyui"
    routes: Final = ROUTES

    def __init__(self, control: Control) -> None:
        self._control = control

    def headers(self, headers: Headers) -> Headers:
        """Keep the client's Host: ComfyUI compares it with the Origin of a browser."""
        return headers

    def needs_lock(self, kind: Kind, path: str, body: bytes) -> bool:
        """Every `/prompt` needs the card."""
        return True

    async def probe(self) -> str:
        """Give ComfyUI's version."""
        reply = await self._control.get("/system_stats", timeout=_PROBE_SECONDS)
        document = reply.document()
        if document is None:
            raise UpstreamError(f"no version from {self._control.upstream.url}: {reply.status}")
        system = document.get("system")
        return str(system.get("comfyui_version", "unknown")) if isinstance(system, dict) else ""

    async def queue(self) -> Queue:
        """Give the jobs that ComfyUI knows of.

        Raises:
            UpstreamError: It does not say.
        """
        reply = await self._control.get("/queue", timeout=_CALL_SECONDS)
        document = reply.document()
        if document is None:
            raise UpstreamError(f"no queue from {self._control.upstream.url}: {reply.status}")
        return Queue(_ids(document.get("queue_running")), _ids(document.get("queue_pending")))

    async def follow(
        self, prompt_id: str, timeout: float, action: Literal["release", "interrupt"]
    ) -> JobResult:
        """Wait until a job has ended.

        Args:
            prompt_id: Its id.
            timeout: Seconds; then `action` decides about a job that still runs.
            action: `interrupt` ends the job in ComfyUI, `release` leaves it running.
        """
        result = await self._follow(prompt_id, timeout)
        if result is not None:
            return result
        fields = {"prompt_id": prompt_id, "action": action}
        logger.warning("image job: still there after %gs", timeout, extra=fields)
        if action == "interrupt":
            await self._try_post("/interrupt", {"prompt_id": prompt_id})
            await self._follow(prompt_id, _INTERRUPT_SECONDS)
        return JobResult.TIMEOUT

    async def free(self) -> bool:
        """Ask ComfyUI to free its memory; True when it took the request, which is not yet done."""
        return await self._try_post("/free", {"unload_models": True, "free_memory": True})

    async def _try_post(self, path: str, value: object) -> bool:
        try:
            reply = await self._control.post(path, value, timeout=_CALL_SECONDS)
        except UpstreamError as error:
            logger.warning("comfyui: %s", error)
            return False
        if not reply.accepted:
            logger.warning("comfyui refused %s: %d", path, reply.status)
        return reply.accepted

    async def _follow(self, prompt_id: str, timeout: float) -> JobResult | None:
        """Poll until the job has ended; None after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        refused_since: float | None = None
        looks = 0
        while True:
            try:
                result = await self._look(prompt_id)
                refused_since = None
            except UpstreamRefusedError:
                result = None
                refused_since = refused_since or time.monotonic()
                if time.monotonic() - refused_since > _REFUSED_SECONDS:
                    return JobResult.LOST
            except UpstreamError as error:
                # Busy or hung is not gone: the job may well be computing.
                result = None
                logger.debug("image job: %s", error, extra={"prompt_id": prompt_id})
            left = deadline - time.monotonic()
            if result is not None or left <= 0:
                return result
            await asyncio.sleep(min(_POLL_SECONDS[min(looks, len(_POLL_SECONDS) - 1)], left))
            looks += 1

    async def _look(self, prompt_id: str) -> JobResult | None:
        """Look once; None while the job waits or runs."""
        queue = await self.queue()
        if prompt_id in queue.running or prompt_id in queue.pending:
            return None
        path = f"/history/{quote(prompt_id, safe='')}"
        reply = await self._control.get(path, timeout=_CALL_SECONDS)
        document = reply.document()
        if document is None:
            raise UpstreamError(f"no history from {self._control.upstream.url}: {reply.status}")
        entry = document.get(prompt_id)
        return JobResult.LOST if not isinstance(entry, dict) else _result(entry.get("status"))


def _ids(items: object) -> list[str]:
    """Give the job ids of a queue list, whose items are [number, id, graph, …]."""
    if not isinstance(items, list):
        return []
    return [str(item[1]) for item in items if isinstance(item, list) and len(item) > 1]


def _result(status: object) -> JobResult:
    """Read the end of a job from its history entry; old versions write none into it."""
    if not isinstance(status, dict) or status.get("completed") is True:
        return JobResult.DONE
    if status.get("status_str") != "error":
        return JobResult.DONE
    messages = status.get("messages")
    interrupted = isinstance(messages, list) and any(
        isinstance(message, list) and message[:1] == ["execution_interrupted"]
        for message in messages
    )
    return JobResult.INTERRUPTED if interrupted else JobResult.ERROR
