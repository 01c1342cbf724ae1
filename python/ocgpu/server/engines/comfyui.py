"""ComfyUI: its routes, its Host rule, its queue, its history and its `/free`.

Facts of real runs that this rests on: `/queue` and `/history` change under one mutex, so an id that
is absent from `/queue` and then from `/history` is gone for good (deleted, wiped, or lost in a
restart); an id that was used before shows its old history while the new run goes on, so what is
queued is looked at first; `/free` only sets flags, and a job that runs is never touched by it.

What is queued is asked of `/api/jobs`, where ComfyUI has it: it lists the same jobs without their
graphs. `/api/jobs/<id>` is not used: it repeats the graph as the history does, and it looks at the
history first, so that an id that was used before is "completed" while it runs again.
"""

import logging
from typing import Final
from urllib.parse import quote

from ocgpu.server.arbiter import Kind
from ocgpu.server.engines.comfy_documents import (
    JobResult,
    Queue,
    read_history,
    read_jobs,
    read_queue,
)
from ocgpu.server.relay.asgi import Headers
from ocgpu.server.relay.control import Control, Reply, UpstreamTimeoutError
from ocgpu.server.relay.upstream import UpstreamConnectError, UpstreamError
from ocgpu.server.routes import RouteTable

__all__ = ["ComfyUI", "UnreadableError"]

logger: Final = logging.getLogger("ocgpu.server")

ROUTES: Final = RouteTable(exact={"/prompt": Kind.IMAGE, "/api/prompt": Kind.IMAGE})

# A garbage collection in ComfyUI's worker stalls its HTTP for a quarter of a second, the load of
# a checkpoint for longer.
_CALL_SECONDS: Final = 10.0
_PROBE_SECONDS: Final = 3.0
_JOBS: Final = "/api/jobs?status=pending,in_progress"


class UnreadableError(UpstreamError):
    """What answered is no ComfyUI that we know: a login page, a gateway's error, a fork."""


class ComfyUI:
    """One ComfyUI behind the proxy.

    Attributes:
        kept_bytes: What its process keeps of the card whatever it frees: a CUDA context.

    Args:
        control: Calls to it.
    """

    name: Final = "comfyui"
    routes: Final = ROUTES
    kept_bytes: Final = 512 << 20

    def __init__(self, control: Control) -> None:
        self._control = control
        # Until it says otherwise; asked again after it was not reached, for it may be a new one.
        self._lists_jobs = True

    @property
    def url(self) -> str:
        """Where it is."""
        return self._control.upstream.url

    def headers(self, headers: Headers) -> Headers:
        """Keep the client's Host: ComfyUI compares it with the Origin of a browser."""
        return headers

    def needs_lock(self, kind: Kind, path: str, body: bytes) -> bool:
        """Every `/prompt` needs the card."""
        return True

    async def quiet(self) -> None:
        """Return at once: what a client does has no part in when a job of ComfyUI ends."""

    async def probe(self) -> str:
        """Give ComfyUI's version."""
        reply = await self._control.get("/system_stats", timeout=_PROBE_SECONDS)
        document = reply.document()
        if document is None:
            raise UnreadableError(f"no version from {self.url}: {reply.status}")
        system = document.get("system")
        version = system.get("comfyui_version") if isinstance(system, dict) else None
        return version if isinstance(version, str) else "unknown"

    async def remaining(self) -> int:
        """Give how many jobs wait or run: the cheapest question that it answers.

        Raises:
            UpstreamError: It does not say.
        """
        reply = await self._control.get("/prompt", timeout=_PROBE_SECONDS)
        info = (reply.document() or {}).get("exec_info")
        number = info.get("queue_remaining") if isinstance(info, dict) else None
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise UnreadableError(f"no number of jobs from {self.url}: {reply.status}")
        return number

    async def queue(self, *, timeout: float | None = None) -> Queue:
        """Give the jobs that wait or run.

        Args:
            timeout: Seconds for each of at most two calls; None for what an engine at work needs.

        Raises:
            UpstreamError: It does not say.
        """
        timeout = _CALL_SECONDS if timeout is None else timeout
        try:
            queue = await self._listed(timeout) if self._lists_jobs else None
            if queue is None:
                reply = await self._control.get("/queue", timeout=timeout)
                queue = read_queue(_body(reply))
        except UpstreamConnectError:
            self._lists_jobs = True
            raise
        if queue is None:
            raise UnreadableError(f"no queue from {self.url}: {reply.status}")
        return queue

    async def outcome(self, prompt_id: str) -> JobResult | None:
        """Give how a job ended that is no longer queued; None when ComfyUI does not know it.

        Raises:
            UpstreamError: It does not say.
        """
        path = f"/history/{quote(prompt_id, safe='')}"
        reply = await self._control.get(path, timeout=_CALL_SECONDS)
        history = read_history(_body(reply))
        if history is None:
            raise UnreadableError(f"no history from {self.url}: {reply.status}")
        return history.get(prompt_id)

    async def cancel(self, prompt_id: str) -> None:
        """Ask ComfyUI to end one job, whether it waits or runs."""
        try:
            queue = await self.queue()
        except UpstreamError as error:
            logger.warning("comfyui: %s", error)
            return
        # An interrupt does nothing to a job that waits, and in old versions it ends whatever runs.
        if prompt_id in queue.pending:
            await self._try_post("/queue", {"delete": [prompt_id]})
        elif prompt_id in queue.running:
            await self._try_post("/interrupt", {"prompt_id": prompt_id})

    async def free(self) -> bool:
        """Ask ComfyUI to free its memory; True when it took the request, which is not yet done."""
        return await self._try_post("/free", {"unload_models": True, "free_memory": True})

    async def _listed(self, timeout: float) -> Queue | None:
        """Ask `/api/jobs`; None when this ComfyUI has none, or cannot answer it just now."""
        reply = await self._control.get(_JOBS, timeout=timeout)
        queue = read_jobs(_body(reply))
        # A job with an odd `extra_data` makes a 500 of the whole list, for as long as it is queued.
        self._lists_jobs = queue is not None or reply.status >= 500
        return queue

    async def _try_post(self, path: str, value: object) -> bool:
        try:
            reply = await self._control.post(path, value, timeout=_CALL_SECONDS)
        except UpstreamError as error:
            logger.warning("comfyui: %s", error)
            return False
        if not reply.accepted:
            logger.warning("comfyui refused %s: %d", path, reply.status)
        return reply.accepted


def _body(reply: Reply) -> bytes:
    """Give the body of a success; b"", which is no document, for everything else.

    Raises:
        UpstreamTimeoutError: A gateway in between had no answer from ComfyUI in time.
    """
    if reply.status == 504:
        raise UpstreamTimeoutError("no answer from ComfyUI to a gateway in between: 504")
    return reply.body if reply.accepted else b""
