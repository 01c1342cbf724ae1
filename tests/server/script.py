"""Both engines played by hand behind one address, and the parts of an image job wired to them."""

import asyncio
import json

from ocgpu.server.admission import Admission
from ocgpu.server.arbiter import Arbiter, Kind, State
from ocgpu.server.engines.comfyui import ComfyUI
from ocgpu.server.engines.ollama import Ollama
from ocgpu.server.image_job import ImageJobs, ImageSettings, Prompt
from ocgpu.server.metrics import Metrics
from ocgpu.server.relay.client import HttpUpstream
from ocgpu.server.relay.control import Control
from ocgpu.server.residency import Residency
from tests.server.inloop import Connection

__all__ = ["PROMPT", "Bench", "Script", "answer"]

PROMPT = Prompt(b"/prompt", [(b"host", b"x")], b"{}")


class Script:
    """Both engines behind one address; a test sets what they answer and reads what they were asked.

    Attributes:
        calls: `METHOD path` in order.
        queue: Ids that run once a prompt was posted.
        foreign: Ids that run from the start, for they never came through us.
        history: Entries by id.
        models: What `/api/ps` lists.
        comes: A model that it lists from its second answer on.
        stuck: Models that it goes on to list.
        listless: It is no Ollama and has no list.
        prompt: The whole answer to `/prompt`; None cuts the connection.
        gates: A call of that name is held until its event is set.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.queue: list[str] = []
        self.foreign: list[str] = []
        self.history: dict[str, dict] = {}
        self.models: list[str] = []
        self.comes: str | None = None
        self.stuck: list[str] = []
        self.listless = False
        self.prompt: bytes | None = answer(b'{"prompt_id":"a"}')
        self.gates: dict[str, asyncio.Event] = {}

    async def __call__(self, connection: Connection) -> None:
        while True:
            head = await connection.head()
            name = head[0].decode().rpartition(" ")[0]
            length = next(
                (line for line in head if line.lower().startswith(b"content-length")), b""
            )
            body = await connection.read(int(length.partition(b":")[2] or 0))
            self.calls.append(name)
            if name in self.gates:
                await self.gates[name].wait()
            reply = self.answer(name, body)
            if reply is None:
                return
            await connection.write(reply)

    def answer(self, name: str, body: bytes) -> bytes | None:
        if name == "POST /prompt":
            return self.prompt
        if name.startswith("GET /api/jobs"):
            return answer(b"", b"404 Not Found")
        if name == "GET /queue":
            ours = self.queue if self.count("POST /prompt") else []
            running = [[0, number, {}, {}, []] for number in (*self.foreign, *ours)]
            return answer(json.dumps({"queue_running": running, "queue_pending": []}).encode())
        if name.startswith("GET /history/"):
            return answer(json.dumps(self.history).encode())
        if name == "GET /api/ps" and self.listless:
            return answer(b"", b"404 Not Found")
        if name == "GET /api/ps":
            names = [{"name": name} for name in (*self.models, *self.stuck)]
            if self.comes is not None:
                self.models, self.comes = [*self.models, self.comes], None
            return answer(json.dumps({"models": names}).encode())
        if name == "POST /api/generate" and json.loads(body).get("keep_alive") == 0:
            told = json.loads(body)["model"]
            self.models = [name for name in self.models if name != told]
        return answer(b"{}")

    def count(self, name: str) -> int:
        return self.calls.count(name)

    async def reached(self, name: str, number: int = 1) -> None:
        """Wait until a call came in."""
        async with asyncio.timeout(10):
            while self.count(name) < number:  # noqa: ASYNC110 - another task counts
                await asyncio.sleep(0.002)

    def end(self, prompt_id: str, **status: object) -> None:
        """End a job as ComfyUI would."""
        (self.foreign if prompt_id in self.foreign else self.queue).remove(prompt_id)
        done = {"status_str": "success", "completed": True, "messages": []}
        self.history[prompt_id] = {"status": {**done, **status}}


def answer(body: bytes, status: bytes = b"200 OK", *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class Bench:
    """All parts of an image job, wired to a script."""

    def __init__(self, script: Script, url: str, batch: int, **settings: object) -> None:
        self.script = script
        self.upstream = HttpUpstream(url, 1.0)
        control = Control(self.upstream)
        self.metrics = Metrics()
        self.admission = Admission(
            Arbiter(batch), self.metrics, max_queue=100, max_waiting_bytes=1000
        )
        values = {
            "unload_timeout": 1.0,
            "job_timeout": 20.0,
            "job_timeout_action": "release",
            "warm_model": "",
            **settings,
        }
        self.jobs = ImageJobs(
            self.admission,
            self.metrics,
            Ollama(control),
            ComfyUI(control),
            self.upstream,
            ImageSettings(**values),
            Residency(None, "not in this test", 0.0),
        )

    async def post(self) -> object:
        return await self.jobs.post(await self.admission.acquire(Kind.IMAGE), PROMPT)

    async def idle(self) -> None:
        """Wait until the lock is idle."""
        async with asyncio.timeout(10):
            while self.admission.counts.state is not State.IDLE:  # noqa: ASYNC110 - a poll of a test
                await asyncio.sleep(0.002)

    @property
    def results(self) -> dict[str, int]:
        return {name: number for name, number in self.metrics.image_jobs.items() if number}
