"""The queue, the worker and the history of the simulated ComfyUI.

As ComfyUI's execution.py and main.py: the worker takes the job with the lowest number, executes it
node by node, enters it into the history only when it is done, and looks at the flags that `/free`
sets after each job and when it is idle.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ocgpu.simulators.comfyui_graph import Graph, job_order, signature
from ocgpu.simulators.comfyui_sockets import Sockets
from ocgpu.simulators.usage import Usage

__all__ = ["JOB_STATUSES", "Job", "JobQueue"]

BYTES_PER_PIXEL = 4
MEMORY_BYTES = 2**40
JOB_STATUSES = ("pending", "in_progress", "completed", "failed", "cancelled")


class NodeFailedError(Exception):
    """A node raised; the worker goes on with the next job."""


class InterruptedJobError(Exception):
    """The job was interrupted at a node's boundary."""


@dataclass
class Job:
    """One accepted prompt.

    Attributes:
        number: Its place: the lowest runs first.
        prompt_id: Its name.
        graph: What was posted.
        extra_data: The same, with client id and creation time added.
        outputs: Ids of the output nodes that run.
        client_id: Whose socket hears of it, None for nobody's.
        messages: What `status.messages` of its history entry will say.
        results: What its output nodes made.
        node: The node that runs now.
        interrupted: Asked to end at the next node.
    """

    number: float
    prompt_id: str
    graph: Graph
    extra_data: dict[str, Any]
    outputs: list[str]
    client_id: str | None
    messages: list[list[Any]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    node: str = ""
    interrupted: bool = False

    def item(self) -> list[Any]:
        """Its entry in `/queue`."""
        return [self.number, self.prompt_id, self.graph, self.extra_data, self.outputs]

    def entry(self, *, success: bool) -> dict[str, Any]:
        """Its entry in `/history`."""
        outputs = self.results if success else {}
        return {
            "prompt": self.item(),
            "outputs": outputs,
            "status": {
                "status_str": "success" if success else "error",
                "completed": success,
                "messages": self.messages,
            },
            "meta": {key: _meta(key) for key in outputs},
        }


class JobQueue:
    """Runs jobs one after the other.

    Args:
        usage: Told of computing and of the memory that the image models take.
        sockets: Told of everything that happens.
        node_seconds: What a node takes.
        history_lag_seconds: From `execution_success` to the history entry.
        free_lag_seconds: From a flag that the worker sees to the memory given back.
        model_bytes: What the image models take, from the first job to `/free`.
        before_node: Called before each node's time is over; a fake may hold the job there.
        before_end: Called before the job enters the history.
    """

    def __init__(
        self,
        usage: Usage,
        sockets: Sockets,
        *,
        node_seconds: float,
        history_lag_seconds: float,
        free_lag_seconds: float,
        model_bytes: int,
        before_node: Callable[[Job, str], Awaitable[None]],
        before_end: Callable[[Job], Awaitable[None]],
    ) -> None:
        self.node_seconds = node_seconds
        self.history_lag_seconds = history_lag_seconds
        self.free_lag_seconds = free_lag_seconds
        self.model_bytes = model_bytes
        self.pending: list[Job] = []
        self.running: Job | None = None
        self.history: dict[str, dict[str, Any]] = {}
        self._usage = usage
        self._sockets = sockets
        self.before_node = before_node
        self.before_end = before_end
        self._flags: dict[str, bool] = {}
        self._cache: dict[str, Any] = {}
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._images = 0

    def start(self) -> None:
        """Let the worker run in the current loop."""
        self._worker = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """End the worker and forget everything, as a killed process does."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        self.pending.clear()
        self.running = None
        self.history.clear()
        self._flags.clear()
        self._cache.clear()
        self._usage.hold(-self._usage.resident_bytes)

    def remaining(self) -> int:
        """How many jobs wait or run."""
        return len(self.pending) + (self.running is not None)

    def listed(self) -> list[dict[str, Any]]:
        """Every job as `/api/jobs` lists it, without its graph."""
        running = [] if self.running is None else [self.running]
        jobs = [(job.prompt_id, "in_progress", job.number) for job in running]
        jobs += [(job.prompt_id, "pending", job.number) for job in self.pending]
        jobs += [(key, _status(entry), entry["prompt"][0]) for key, entry in self.history.items()]
        return [{"id": key, "status": status, "priority": place} for key, status, place in jobs]

    def put(self, job: Job) -> None:
        """Queue `job`."""
        self.pending.append(job)
        self.pending.sort(key=lambda other: other.number)
        self.tell_status()
        self._wake.set()

    def delete(self, prompt_ids: list[str]) -> None:
        """Drop pending jobs; the running one and unknown ones are ignored."""
        kept = [job for job in self.pending if job.prompt_id not in prompt_ids]
        if len(kept) < len(self.pending):
            self.pending = kept
            self.tell_status()
            self.tell_status()

    def interrupt(self, prompt_id: str | None = None) -> None:
        """End the running job at its next node, where it is the one named or none is named."""
        if self.running is not None and prompt_id in {None, self.running.prompt_id}:
            self.running.interrupted = True

    def set_flag(self, name: str) -> None:
        """Have the worker act on `unload_models` or `free_memory` when it comes to it."""
        self._flags[name] = True
        self._wake.set()

    def tell_status(self) -> None:
        """Send every socket the number of jobs."""
        exec_info = {"queue_remaining": self.remaining()}
        self._sockets.send("status", {"status": {"exec_info": exec_info}})

    async def _work(self) -> None:
        while True:
            while not self.pending and not self._flags:
                self._wake.clear()
                await self._wake.wait()
            if self.pending:
                await self._run(self.pending.pop(0))
            await self._act_on_flags()

    async def _act_on_flags(self) -> None:
        flags, self._flags = self._flags, {}
        free_memory = flags.get("free_memory", False)
        if not flags.get("unload_models", free_memory):
            return
        await asyncio.sleep(self.free_lag_seconds)
        self._usage.hold(-self._usage.resident_bytes)
        if free_memory:
            self._cache.clear()

    async def _run(self, job: Job) -> None:
        self.running = job
        self.tell_status()
        self._note(job, "execution_start", {})
        try:
            await self._execute(job)
        except (NodeFailedError, InterruptedJobError):
            success = False
        else:
            success = True
            self._note(job, "execution_success", {})
        await asyncio.sleep(self.history_lag_seconds)
        await self.before_end(job)
        self.history[job.prompt_id] = job.entry(success=success)
        self.running = None
        self.tell_status()
        if job.client_id is not None:
            data = {"node": None, "prompt_id": job.prompt_id}
            self._sockets.send("executing", data, job.client_id)

    async def _execute(self, job: Job) -> None:
        order = job_order(job.graph, job.outputs)
        keys = {node: signature(job.graph, node) for node in order}
        cached = [node for node in order if keys[node] in self._cache]
        self._note(job, "execution_cached", {"nodes": cached})
        # Only the last graph's results are kept, as in ComfyUI's default cache.
        self._cache = {keys[node]: self._cache[keys[node]] for node in cached}
        progress: dict[str, Any] = {}
        for node in cached:
            if node in job.outputs:
                self._tell_executed(job, node, self._cache[keys[node]])
        for node in order:
            if node not in cached:
                await self._execute_node(job, node, progress)
                self._cache[keys[node]] = job.results.get(node)

    async def _execute_node(self, job: Job, node: str, progress: dict[str, Any]) -> None:
        job.node = node
        self._tell_progress(job, node, progress, finished=False)
        self._tell(job, "executing", {"node": node, "display_node": node})
        if job.interrupted:
            self._fail(job, node, list(progress)[:-1], "execution_interrupted", {})
            raise InterruptedJobError
        if not self._usage.resident_bytes:
            self._usage.hold(self.model_bytes)
        with self._usage.compute():
            await self.before_node(job, node)
            await asyncio.sleep(self.node_seconds)
        self._check_memory(job, node, list(progress)[:-1])
        if node in job.outputs:
            self._tell_executed(job, node, {"images": [self._image(job.graph[node])]})
        self._tell_progress(job, node, progress, finished=True)

    def _check_memory(self, job: Job, node: str, executed: list[str]) -> None:
        inputs = job.graph[node].get("inputs", {})
        sizes = [inputs.get(name, 0) for name in ("width", "height", "batch_size")]
        size = sizes[0] * sizes[1] * sizes[2] * BYTES_PER_PIXEL
        if size < MEMORY_BYTES:
            return
        failure = {
            "exception_message": f"you tried to allocate {size} bytes",
            "exception_type": "RuntimeError",
            "traceback": [],
            "current_inputs": {key: [value] for key, value in inputs.items()},
            "current_outputs": job_order(job.graph, job.outputs),
        }
        self._fail(job, node, executed, "execution_error", failure)
        raise NodeFailedError

    def _fail(
        self, job: Job, node: str, executed: list[str], event: str, more: dict[str, Any]
    ) -> None:
        node_type = job.graph[node]["class_type"]
        where = {"node_id": node, "node_type": node_type, "executed": executed}
        self._note(job, event, {**where, **more})

    def _note(self, job: Job, event: str, data: dict[str, Any]) -> None:
        full = {**data, "prompt_id": job.prompt_id, "timestamp": int(time.time() * 1000)}
        job.messages.append([event, full])
        if event == "execution_interrupted":
            self._sockets.send(event, full)
        elif job.client_id is not None:
            self._sockets.send(event, full, job.client_id)

    def _tell(self, job: Job, event: str, data: dict[str, Any]) -> None:
        if job.client_id is not None:
            self._sockets.send(event, {**data, "prompt_id": job.prompt_id}, job.client_id)

    def _tell_executed(self, job: Job, node: str, output: dict[str, Any]) -> None:
        job.results[node] = output
        self._tell(job, "executed", {"node": node, "display_node": node, "output": output})

    def _tell_progress(
        self, job: Job, node: str, progress: dict[str, Any], *, finished: bool
    ) -> None:
        progress[node] = {
            "value": 1.0 if finished else 0.0,
            "max": 1.0,
            "state": "finished" if finished else "running",
            "node_id": node,
            "prompt_id": job.prompt_id,
            "display_node_id": node,
            "parent_node_id": None,
            "real_node_id": node,
        }
        # Without a client id this one goes to every socket, as recorded from ComfyUI 0.33.
        data = {"prompt_id": job.prompt_id, "nodes": dict(progress)}
        self._sockets.send("progress_state", data, job.client_id)

    def _image(self, node: dict[str, Any]) -> dict[str, str]:
        self._images += 1
        prefix = node.get("inputs", {}).get("filename_prefix", "ComfyUI_temp")
        kind = "output" if node["class_type"] == "SaveImage" else "temp"
        return {"filename": f"{prefix}_{self._images:05}_.png", "subfolder": "", "type": kind}


def _meta(node: str) -> dict[str, Any]:
    return {"node_id": node, "display_node": node, "parent_node": None, "real_node_id": node}


def _status(entry: dict[str, Any]) -> str:
    status = entry["status"]
    if status["completed"]:
        return "completed"
    events = [message[0] for message in status["messages"]]
    return "cancelled" if "execution_interrupted" in events else "failed"
