"""The life of one image job: unload, post, follow to its real end, free, release.

A job is a task of its own. The client waits for its answer only; once `/prompt` may have reached
ComfyUI, the job goes on whether the client stays or not, because the card is in use either way.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, Literal

from ocgpu.server.admission import Admission, Grant
from ocgpu.server.arbiter import Kind, State
from ocgpu.server.comfy_jobs import ComfyJobs
from ocgpu.server.engines.comfy_documents import Queue, read_prompt_id
from ocgpu.server.engines.comfyui import ComfyUI
from ocgpu.server.engines.ollama import Ollama
from ocgpu.server.freeing import Freeing
from ocgpu.server.metrics import Metrics
from ocgpu.server.refusal import RefusedError
from ocgpu.server.relay.asgi import Headers
from ocgpu.server.relay.control import Reply, read_reply
from ocgpu.server.relay.upstream import Upstream, UpstreamConnectError, UpstreamError
from ocgpu.server.residency import Residency
from ocgpu.server.warm_up import warm_up

__all__ = ["ImageJobs", "ImageSettings", "Prompt"]

logger: Final = logging.getLogger("ocgpu.server")

# `/prompt` is answered within milliseconds, or seconds where a worker holds Python's lock. After
# this the queue tells what became of it: a job of 15 minutes must not be waited for in vain.
_PROMPT_SECONDS: Final = 60.0
# A ComfyUI that answers does so within this; before it, no listener is open.
_GLANCE_SECONDS: Final = 0.2
# One that loads a checkpoint is silent for seconds; the first requests wait for it as long.
_ADOPT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """What an image job is bounded by, in seconds.

    Attributes:
        unload_timeout: For Ollama to unload.
        job_timeout: For the job, from ComfyUI's answer on.
        job_timeout_action: What becomes of a job that is still there after that.
        warm_model: Model to load after an image job; "" is none.
        settle_timeout: For the memory to be back after an engine has freed it; 0 is no wait.
    """

    unload_timeout: float
    job_timeout: float
    job_timeout_action: Literal["release", "interrupt"]
    warm_model: str
    settle_timeout: float = 0.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request for `/prompt`, as it goes to ComfyUI."""

    target: bytes
    headers: Headers
    body: bytes


class ImageJobs:
    """Runs image jobs that hold the lock, each to its end.

    Attributes:
        queue: The jobs in ComfyUI's queue.
        card: Frees the card of either engine.

    Args:
        admission: Where warming up asks for the lock.
        metrics: Takes results and unload seconds.
        ollama: Unloaded before a job; None when there is no Ollama.
        comfyui: Follows jobs and frees; None when there is no ComfyUI.
        upstream: ComfyUI's HTTP server; None as above.
        settings: The bounds.
        residency: The machine's lease.
    """

    def __init__(
        self,
        admission: Admission,
        metrics: Metrics,
        ollama: Ollama | None,
        comfyui: ComfyUI | None,
        upstream: Upstream | None,
        settings: ImageSettings,
        residency: Residency,
    ) -> None:
        self.queue = ComfyJobs(comfyui, metrics, settings.job_timeout, settings.job_timeout_action)
        self.card = Freeing(
            ollama,
            comfyui,
            metrics,
            unload_timeout=settings.unload_timeout,
            settle_timeout=settings.settle_timeout,
        )
        self._admission = admission
        self._ollama = ollama
        self._comfyui = comfyui
        self._upstream = upstream
        self._settings = settings
        self._residency = residency
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._warming = False
        admission.on_abandoned = self._abandoned

    async def post(self, grant: Grant, prompt: Prompt) -> Reply:
        """Run a job under `grant`, which is the job's from here on; give ComfyUI's answer.

        Cancelled before `/prompt` was sent, the job never reaches ComfyUI. Cancelled later, only
        the answer is lost.

        Raises:
            RefusedError: Somebody outside has the card.
            UpstreamError: ComfyUI gave no answer.
        """
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        job = _Job(self, grant, prompt, answer)
        task = self._spawn(job.run())
        # A callback and not a `finally` in the task: a task that is cancelled before its first
        # step runs none of its code.
        task.add_done_callback(lambda _task: self._settle(job))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if not job.sent:
                logger.info("image job: its client left before it was sent")
                answer.cancel()
                task.cancel()
            raise

    async def adopt(self) -> None:
        """Take the lock for jobs that run in ComfyUI from before our start, as if they were ours.

        To be awaited before the first request is served: when it returns, the lock is taken, unless
        ComfyUI has no job. The rest is done by a task.
        """
        if self._comfyui is None:
            return
        look = asyncio.ensure_future(self._comfyui.queue(timeout=_ADOPT_SECONDS))
        try:
            await asyncio.wait((look,), timeout=_GLANCE_SECONDS)
        except asyncio.CancelledError:
            look.cancel()
            raise
        if not look.done() or (look.exception() is None and look.result().ids):
            self._spawn(self._adopted(await self._admission.acquire(Kind.IMAGE), look))
        elif look.exception() is None:
            await self._free_leftovers(self._comfyui)

    async def _free_leftovers(self, comfyui: ComfyUI) -> None:
        """Free what a job left whose end nobody saw, because serve was not there."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GLANCE_SECONDS):
                await comfyui.free()

    async def _adopted(self, grant: Grant, look: "asyncio.Future[Queue]") -> None:
        with grant:
            try:
                jobs = (await look).ids
            except UpstreamError as error:
                logger.warning("no look for old image jobs: %s", error)
                return
            if jobs:
                await self.card.unload_models()
                # The job computes already, whoever else may have the card.
                self._residency.try_take()
                await self.queue.follow_all(jobs)
                await self.end(grant, None)

    async def take_card(self, grant: Grant) -> None:
        """Empty the card of the LLM side and take the machine's lease for images.

        Raises:
            RefusedError: Somebody outside has the card and did not give it up in time.
        """
        models, empty = await self.card.unload_models()
        phase = "llm side unloaded" if empty else "goes on, models may be loaded still"
        logger.log(
            logging.INFO if empty else logging.WARNING,
            "image job: %s",
            phase,
            extra={"models": models},
        )
        if not self._residency.try_take():
            with grant.paused():
                await self._residency.take()
        if not grant.held:
            self._residency.give_up()
            raise RefusedError("reset", "the lock was released by force; send the image again")

    async def close(self) -> None:
        """End all jobs' tasks; the jobs themselves go on in ComfyUI."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("image job failed", exc_info=task.exception())

    def _settle(self, job: "_Job") -> None:
        """See to it that the lock is released, and freed first where models may be left."""
        if job.dirty and not self._closed:
            self._spawn(self.end(job.grant, job.prompt_id))
        elif not job.over:
            self._let_go(job.grant)
        job.fail(UpstreamError("the image job ended before ComfyUI answered"))

    def _let_go(self, grant: Grant) -> None:
        """Give up the lease and the lock; nothing of an image is on the card."""
        if grant.held and self._residency.mode == "exclusive":
            self._residency.give_up()
        grant.release()

    def _abandoned(self, grant: Grant) -> None:
        if self._closed:
            grant.release()
        else:
            self._spawn(self.end(grant, None))

    async def send(self, prompt: Prompt) -> Reply:
        """Post a prompt on a connection of its own and read the whole answer.

        Raises:
            UpstreamError: No answer, or none in time.
        """
        if self._upstream is None:
            raise UpstreamConnectError("no ComfyUI is configured; set `COMFY_URL`")
        try:
            async with (
                asyncio.timeout(min(self._settings.job_timeout, _PROMPT_SECONDS)),
                self._upstream.request(
                    "POST", prompt.target, prompt.headers, prompt.body, fresh=True
                ) as response,
            ):
                return await read_reply(response)
        except TimeoutError:
            raise UpstreamError("ComfyUI did not answer the prompt in time") from None

    async def end(self, grant: Grant, prompt_id: str | None) -> None:
        """Hand the card over to the next image as it is, or free it, release, and warm up.

        An owner whose lock was reset has no say in it any more.
        """
        fields = {"prompt_id": prompt_id}
        if not grant.held:
            if self._admission.counts.state is not State.IMAGE:
                # Else whoever has the card now frees it.
                await self.card.free_images()
            return
        # A card that is somebody else's, as after a restart, is not ours to hand over.
        ours = not self._residency.enabled or self._residency.mode == "exclusive"
        if ours and grant.finish():
            logger.info("image job: handed over to the next", extra=fields)
            return
        try:
            freed = await self.card.free_images()
            told = "told ComfyUI to free its memory" if freed else "ComfyUI was not told to free"
            logger.log(
                logging.INFO if freed else logging.WARNING, "image job: %s", told, extra=fields
            )
        finally:
            self._let_go(grant)
        if self._settings.warm_model and self._ollama is not None and not self._warming:
            self._spawn(self._warm(self._ollama))

    async def _warm(self, ollama: Ollama) -> None:
        self._warming = True
        try:
            await warm_up(self._admission, ollama, self._settings.warm_model)
        finally:
            self._warming = False


class _Job:
    """One image job in flight.

    Attributes:
        grant: The lock.
        sent: Whether `/prompt` may have reached ComfyUI.
        dirty: Whether image models may be on the card, so that it has to be freed at the end.
        over: Whether `end` has seen to the lock.
        prompt_id: ComfyUI's name for it, once it is known.
    """

    def __init__(
        self, jobs: ImageJobs, grant: Grant, prompt: Prompt, answer: "asyncio.Future[Reply]"
    ) -> None:
        self._jobs = jobs
        self._prompt = prompt
        self._answer = answer
        self.grant = grant
        self.sent = False
        # A card that was handed over still holds the models of the image before.
        self.dirty = grant.continued
        self.over = False
        self.prompt_id: str | None = None

    async def run(self) -> None:
        """Take the job through its phases."""
        if not self.grant.continued:
            try:
                await self._jobs.queue.reach()
                await self._jobs.take_card(self.grant)
            except (RefusedError, UpstreamConnectError) as error:
                self.fail(error)
                return
        await self._jobs.queue.wait_for_others()
        self.sent = True
        try:
            reply = await self._jobs.send(self._prompt)
        except UpstreamConnectError as error:
            self.fail(error)
        except UpstreamError as error:
            # ComfyUI may have queued it and broken off: what it runs now is what we wait for.
            self.dirty = True
            self.fail(error)
            await self._jobs.queue.follow_strangers()
        else:
            self._deliver(reply)
            await self._follow(reply)
        if self.dirty:
            self.over = True
            self.dirty = False
            await self._jobs.end(self.grant, self.prompt_id)

    async def _follow(self, reply: Reply) -> None:
        if self.prompt_id is not None:
            self.dirty = True
            await self._jobs.queue.follow(self.prompt_id)
        elif reply.accepted and await self._jobs.queue.follow_strangers(patient=False):
            # It took something, under a name that we cannot read.
            self.dirty = True

    def fail(self, error: UpstreamError | RefusedError) -> None:
        """Give the client an error, if it has no answer yet."""
        if self._answer.done():
            return
        logger.warning("image job: %s", error)
        self._answer.set_exception(error)
        # Marks it as seen: the client may have left, and then nobody takes it.
        self._answer.exception()

    def _deliver(self, reply: Reply) -> None:
        self.prompt_id = read_prompt_id(reply)
        phase = "not accepted" if self.prompt_id is None else "accepted"
        fields = {"prompt_id": self.prompt_id, "status": reply.status}
        logger.info("image job: %s", phase, extra=fields)
        if not self._answer.done():
            self._answer.set_result(reply)
