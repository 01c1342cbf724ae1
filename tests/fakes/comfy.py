"""A ComfyUI that records its calls and can misbehave."""

from aiohttp import web

from ocgpu.simulators import ComfySimulator
from ocgpu.simulators.comfyui_queue import Job
from tests.fakes.faults import FaultyFake
from tests.fakes.gate import Gate
from tests.fakes.oracle import Oracle
from tests.fakes.record import Record

__all__ = ["FakeComfy"]


class FakeComfy(FaultyFake, ComfySimulator):
    """As fast as can be, until a test holds it.

    Attributes:
        node_gate: Where set, every job is held in each of its nodes here, computing.
        end_gate: Where set, every job is held here after its last node, still in `/queue`.
        history_blank: `/history` never shows any job, though the jobs end.
        queue_blank: `/queue` claims to be empty, though jobs run.
        old: No `/api/jobs` yet, and any text as the id of a prompt, as in 0.3.64.
        deaf: Jobs ignore an interrupt, as a node that never looks does.
    """

    engine = "comfyui"

    def __init__(self, record: Record, oracle: Oracle) -> None:
        super().__init__(record, node_time=0.0, history_lag=0.0)
        oracle.watch(self.usage)
        self.node_gate: Gate | None = None
        self.end_gate: Gate | None = None
        self.history_blank = False
        self.queue_blank = False
        self.deaf = False

    @property
    def old(self) -> bool:
        return self.any_ids

    @old.setter
    def old(self, old: bool) -> None:
        self.any_ids = old

    def hold_jobs(self) -> Gate:
        """Hold every job in its nodes until the gate is open."""
        self.node_gate = Gate()
        return self.node_gate

    async def before_node(self, job: Job, node: str) -> None:
        """Stop at the gate of the nodes."""
        if self.node_gate is not None:
            await self.node_gate.passing()
        if self.deaf:
            job.interrupted = False
        await super().before_node(job, node)

    async def before_end(self, job: Job) -> None:
        """Stop at the gate of the end."""
        if self.end_gate is not None:
            await self.end_gate.passing()
        await super().before_end(job)

    async def history(self, request: web.Request) -> web.StreamResponse:
        """The truth, or nothing."""
        if self.history_blank:
            return web.json_response({})
        return await super().history(request)

    async def queue(self, request: web.Request) -> web.StreamResponse:
        """The truth, or nothing."""
        if self.queue_blank:
            return web.json_response({"queue_running": [], "queue_pending": []})
        return await super().queue(request)

    async def preview(self, image: bytes, client_id: str) -> None:
        """Send an image of any size to a websocket, in one frame."""
        self.sockets.preview(image, client_id)

    async def job_list(self, request: web.Request) -> web.StreamResponse:
        """The truth, or nothing, or what there was before."""
        if self.old:
            return web.Response(status=404, content_type="application/octet-stream")
        if self.queue_blank:
            return web.json_response({"jobs": []})
        return await super().job_list(request)

    async def lose_jobs(self) -> None:
        """Forget every job, as a restart does, and go on listening."""
        await self.jobs.stop()
        self.jobs.start()
