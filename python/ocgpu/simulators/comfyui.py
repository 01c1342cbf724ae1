"""A small ComfyUI: its routes, each also under `/api`, its refusals, its Host and Origin rule."""

import json
import struct
import time
import uuid
import zlib
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from ocgpu.simulators.comfyui_graph import NODES, refusal, validate
from ocgpu.simulators.comfyui_queue import JOB_STATUSES, Job, JobQueue
from ocgpu.simulators.comfyui_sockets import Sockets
from ocgpu.simulators.hosting import Handler, Middleware, Simulator, is_loopback
from ocgpu.simulators.usage import Usage

__all__ = ["ComfySimulator"]

GIB = 1024**3
CARD_BYTES = 16 * GIB
VERSION = "0.33.0"
TROUBLE = "500 Internal Server Error\n\nServer got itself in trouble"
NO_PROMPT = "No prompt provided"
UUID_RULE = (
    "prompt_id must be a UUID string in canonical lowercase hyphenated form; "
    "omit it to let the server generate one"
)


class ComfySimulator(Simulator):
    """Answers as ComfyUI does, without a card.

    Args:
        node_time: Seconds a node of a graph takes.
        history_lag: Seconds from `execution_success` to the history entry.
        free_lag: Seconds from the moment `/free` takes effect to the memory given back.
        model_bytes: What the image models take of the card.

    Attributes:
        usage: What it holds of the card.
        jobs: Its queue and history.
        any_ids: Take any text for the id of a prompt, as versions of 2025 do.
    """

    def __init__(
        self,
        *,
        node_time: float = 0.3,
        history_lag: float = 0.05,
        free_lag: float = 0.0,
        model_bytes: int = 6 * GIB,
    ) -> None:
        super().__init__()
        self.usage = Usage("image")
        self.any_ids = False
        self.sockets = Sockets()
        self.jobs = JobQueue(
            self.usage,
            self.sockets,
            node_seconds=node_time,
            history_lag_seconds=history_lag,
            free_lag_seconds=free_lag,
            model_bytes=model_bytes,
            before_node=self.before_node,
            before_end=self.before_end,
        )
        self._number = 0
        self._uploads: dict[str, bytes] = {}

    async def before_node(self, job: Job, node: str) -> None:
        """A fake may hold `job` in its `node` here."""

    async def before_end(self, job: Job) -> None:
        """A fake may hold `job` here, after its last node and before its history entry."""

    def routes(self) -> Iterable[web.AbstractRouteDef]:
        """Every route twice, then what ComfyUI's static files would answer."""
        plain = [
            web.get("/ws", self._socket),
            web.get("/prompt", self._exec_info),
            web.post("/prompt", self.prompt),
            web.get("/queue", self.queue),
            web.post("/queue", self._change_queue),
            web.get("/api/jobs", self.job_list),
            web.get("/history", self.history),
            web.get("/history/{prompt_id}", self.history),
            web.post("/history", self._change_history),
            web.post("/free", self.free),
            web.post("/interrupt", self._interrupt),
            web.get("/system_stats", self._system_stats),
            web.get("/object_info", self._object_info),
            web.get("/object_info/{name}", self._object_info),
            web.get("/view", self._view),
            web.post("/upload/image", self._upload),
        ]
        doubled = [
            web.RouteDef(route.method, f"/api{route.path}", route.handler, route.kwargs)
            for route in plain
        ]
        return [*plain, *doubled, web.get("/{path:.*}", self._static)]

    def middlewares(self) -> Iterable[Middleware]:
        """The rule that keeps foreign pages out."""
        return (self._guard,)

    async def open(self) -> None:
        """Start the worker."""
        self.jobs.start()

    async def close(self) -> None:
        """End the worker; queue, history and numbers start anew, as after a restart."""
        await self.jobs.stop()
        self._number = 0

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = request.headers
        if headers.get("Sec-Fetch-Site") == "cross-site":
            return web.Response(status=403)
        if _foreign(headers.get("Host", ""), headers.get("Origin", "")):
            return web.Response(status=403)
        if request.method == "OPTIONS":
            return web.Response()
        return await handler(request)

    async def _static(self, request: web.Request) -> web.Response:
        if request.path == "/":
            return web.Response(text="<title>ComfyUI</title>", content_type="text/html")
        return web.Response(status=404, content_type="application/octet-stream")

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        job = self.jobs.running
        running = None if job is None else (job.client_id or "", job.node)
        return await self.sockets.serve(request, self.jobs.remaining(), running)

    async def _exec_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"exec_info": {"queue_remaining": self.jobs.remaining()}})

    async def prompt(self, request: web.Request) -> web.StreamResponse:
        """Queue a graph or refuse it."""
        body = await _json(request)
        if body is None:
            return _trouble()
        try:
            number = self._next_number(body)
        except (TypeError, ValueError):
            return _trouble()
        if not isinstance(body, dict) or "prompt" not in body:
            return _refused(refusal("no_prompt", NO_PROMPT, NO_PROMPT))
        prompt_id = body.get("prompt_id", str(uuid.uuid4()))
        if not self.any_ids and not _is_canonical_uuid(prompt_id):
            kind, message = "invalid_prompt_id", "prompt_id must be a valid UUID"
            return _refused(refusal(kind, message, UUID_RULE))
        verdict = validate(body["prompt"])
        if verdict.error is not None:
            return _refused(verdict.error, verdict.node_errors)
        extra_data = dict(body.get("extra_data", {}))
        client_id = body.get("client_id")
        if client_id is not None:
            extra_data["client_id"] = client_id
        extra_data["create_time"] = _milliseconds()
        self.jobs.put(
            Job(number, prompt_id, body["prompt"], extra_data, verdict.outputs, client_id)
        )
        answer = {"prompt_id": prompt_id, "number": number, "node_errors": verdict.node_errors}
        return web.json_response(answer)

    def _next_number(self, body: object) -> float:
        options = body if isinstance(body, dict) else {}
        if "number" in options:
            return float(options["number"])
        number = self._number
        self._number += 1
        return -number if options.get("front") else number

    async def queue(self, _request: web.Request) -> web.StreamResponse:
        """What runs and what waits; a fake may lie here."""
        running = [] if self.jobs.running is None else [self.jobs.running.item()]
        pending = [job.item() for job in self.jobs.pending]
        return web.json_response({"queue_running": running, "queue_pending": pending})

    async def job_list(self, request: web.Request) -> web.StreamResponse:
        """Jobs without their graphs, by status; a fake may lie here."""
        wanted = [part for part in request.query.get("status", "").split(",") if part]
        if odd := [part for part in wanted if part not in JOB_STATUSES]:
            return web.json_response({"error": f"Invalid status value(s): {odd}"}, status=400)
        jobs = [job for job in self.jobs.listed() if not wanted or job["status"] in wanted]
        page = {"offset": 0, "limit": None, "total": len(jobs), "has_more": False}
        return web.json_response({"jobs": jobs, "pagination": page})

    async def _change_queue(self, request: web.Request) -> web.Response:
        body = await _json(request)
        if not isinstance(body, dict):
            return _trouble()
        if body.get("clear"):
            self.jobs.delete([job.prompt_id for job in self.jobs.pending])
        self.jobs.delete(list(body.get("delete", [])))
        return web.Response()

    async def history(self, request: web.Request) -> web.StreamResponse:
        """All finished jobs, or the one named; a fake may lie here."""
        prompt_id = request.match_info.get("prompt_id")
        entries = self.jobs.history
        if prompt_id is not None:
            entries = {key: value for key, value in entries.items() if key == prompt_id}
        elif "max_items" in request.query:
            entries = dict(list(entries.items())[-int(request.query["max_items"]) :])
        return web.json_response(entries)

    async def _change_history(self, request: web.Request) -> web.Response:
        body = await _json(request)
        if not isinstance(body, dict):
            return _trouble()
        if body.get("clear"):
            self.jobs.history.clear()
        for prompt_id in body.get("delete", []):
            self.jobs.history.pop(prompt_id, None)
        return web.Response()

    async def free(self, request: web.Request) -> web.StreamResponse:
        """Set flags and answer; the worker acts on them when it comes to it."""
        body = await _json(request)
        if not isinstance(body, dict):
            return _trouble()
        for name in ("unload_models", "free_memory"):
            if body.get(name, False):
                self.jobs.set_flag(name)
        return web.Response()

    async def _interrupt(self, request: web.Request) -> web.Response:
        body = await _json(request)
        self.jobs.interrupt(body.get("prompt_id") if isinstance(body, dict) else None)
        return web.Response()

    async def _system_stats(self, _request: web.Request) -> web.Response:
        free = CARD_BYTES - self.usage.resident_bytes
        device = {
            "name": "cuda:0 simulated card",
            "type": "cuda",
            "index": 0,
            "vram_total": CARD_BYTES,
            "vram_free": free,
            "torch_vram_total": self.usage.resident_bytes,
            "torch_vram_free": 0,
        }
        system = {"os": "linux", "comfyui_version": VERSION, "embedded_python": False}
        return web.json_response({"system": system, "devices": [device]})

    async def _object_info(self, request: web.Request) -> web.Response:
        wanted = request.match_info.get("name")
        return web.json_response(
            {
                name: {
                    "input": {"required": node["required"]},
                    "output": node["output"],
                    "name": name,
                    "display_name": name,
                    "category": "image",
                    "output_node": node["output_node"],
                }
                for name, node in NODES.items()
                if wanted in {None, name}
            }
        )

    async def _view(self, request: web.Request) -> web.Response:
        name = request.query.get("filename", "")
        if name in self._uploads:
            return web.Response(body=self._uploads[name], content_type="image/png")
        if not name.endswith("_.png"):
            return web.Response(status=404)
        return web.Response(body=_png(), content_type="image/png")

    async def _upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        image = form.get("image")
        if not isinstance(image, web.FileField):
            return web.Response(status=400)
        self._uploads[image.filename] = image.file.read()
        answer = {"name": image.filename, "subfolder": "", "type": "input"}
        return web.json_response(answer)


async def _json(request: web.Request) -> object:
    """The body whatever its Content-Type says, None where it is not JSON."""
    try:
        return json.loads(await request.read())
    except ValueError:
        return None


def _trouble() -> web.Response:
    return web.Response(status=500, text=TROUBLE)


def _refused(error: dict[str, Any], node_errors: dict[str, Any] | None = None) -> web.Response:
    return web.json_response({"error": error, "node_errors": node_errors or {}}, status=400)


def _foreign(host: str, origin: str) -> bool:
    """Whether a page of `origin` asks a loopback `host` that is not its own."""
    own, asking = urlsplit(f"//{host}"), urlsplit(origin)
    if not own.hostname or not asking.hostname or not is_loopback(own.hostname):
        return False
    if own.port is None or asking.port is None:
        return own.hostname != asking.hostname
    return (own.hostname, own.port) != (asking.hostname, asking.port)


def _is_canonical_uuid(value: object) -> bool:
    try:
        return isinstance(value, str) and str(uuid.UUID(value)) == value
    except ValueError:
        return False


def _milliseconds() -> int:
    return int(time.time() * 1000)


def _png() -> bytes:
    """One grey pixel."""

    def part(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    body = part(b"IHDR", header) + part(b"IDAT", zlib.compress(b"\0\x80")) + part(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
