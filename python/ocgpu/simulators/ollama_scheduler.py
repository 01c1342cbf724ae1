"""Which models are loaded: loading takes time, an unload is answered before it happens.

As Ollama's server/sched.go: one load at a time; a model is listed only once its load is done; an
expiry waits for the requests in flight; the model leaves the list when its process is dead, and
the memory is back a little later.
"""

import asyncio
import datetime
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ocgpu.simulators.ollama_models import Model
from ocgpu.simulators.usage import Usage

__all__ = ["Runner", "Scheduler"]

FOREVER = datetime.datetime(2318, 1, 1, tzinfo=datetime.UTC)


@dataclass
class Runner:
    """A loaded model.

    Attributes:
        model: Which one.
        keep_alive: Seconds to stay after the last request; inf for ever.
        in_flight: Requests that use it now.
        leaving: Its unload has begun.
        gone: Set when it is no longer listed.
        expiry: The timer that will unload it, while nobody uses it.
    """

    model: Model
    keep_alive: float
    in_flight: int = 0
    leaving: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    expiry: asyncio.TimerHandle | None = None

    def entry(self) -> dict[str, Any]:
        """Its entry in `/api/ps`."""
        tag = self.model.tag()
        del tag["modified_at"]
        return {
            **tag,
            "expires_at": self._expires_at().isoformat(),
            "size_vram": self.model.size_bytes,
            "context_length": 4096,
        }

    def _expires_at(self) -> datetime.datetime:
        if math.isinf(self.keep_alive):
            return FOREVER
        return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self.keep_alive)


class Scheduler:
    """Loads, keeps and unloads models.

    Args:
        usage: Told of the memory that the models take.
        load_seconds: From the request to the model listed; the memory is taken at once.
        unload_seconds: From the expiry to the model no longer listed.
        memory_lag_seconds: From there to the memory given back.
        keep_alive_seconds: Where a request does not say.
    """

    def __init__(
        self,
        usage: Usage,
        *,
        load_seconds: float,
        unload_seconds: float,
        memory_lag_seconds: float,
        keep_alive_seconds: float,
    ) -> None:
        self.load_seconds = load_seconds
        self.unload_seconds = unload_seconds
        self.memory_lag_seconds = memory_lag_seconds
        self.keep_alive_seconds = keep_alive_seconds
        self._usage = usage
        self._runners: dict[str, Runner] = {}
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def loaded(self) -> list[Runner]:
        """The models that are listed, the longest-lived first."""
        return sorted(self._runners.values(), key=lambda runner: -runner.keep_alive)

    @asynccontextmanager
    async def use(self, model: Model, keep_alive: float | None) -> AsyncIterator[Runner]:
        """Have `model` loaded while the block runs; leaving the wait aborts the load."""
        runner = await self._runner_for(model)
        runner.in_flight += 1
        if runner.expiry is not None:
            runner.expiry.cancel()
            runner.expiry = None
        if keep_alive is not None:
            runner.keep_alive = keep_alive
        try:
            yield runner
        finally:
            runner.in_flight -= 1
            self._let_expire(runner)

    def expire(self, model: Model) -> None:
        """Unload `model` as soon as nobody uses it; returns at once, nothing when not loaded."""
        runner = self._runners.get(model.name)
        if runner is not None:
            runner.keep_alive = 0.0
            self._let_expire(runner)

    async def close(self) -> None:
        """Forget all models at once, as a killed process does."""
        for runner in self._runners.values():
            if runner.expiry is not None:
                runner.expiry.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._runners.clear()
        self._usage.hold(-self._usage.resident_bytes)

    async def _runner_for(self, model: Model) -> Runner:
        while True:
            runner = self._runners.get(model.name)
            if runner is not None and not runner.leaving:
                return runner
            if runner is not None:
                await runner.gone.wait()
                continue
            async with self._loading:
                if model.name not in self._runners:
                    return await self._load(model)

    async def _load(self, model: Model) -> Runner:
        self._usage.hold(model.size_bytes)
        try:
            await asyncio.sleep(self.load_seconds)
        except asyncio.CancelledError:
            self._usage.hold(-model.size_bytes)
            raise
        runner = Runner(model, self.keep_alive_seconds)
        self._runners[model.name] = runner
        return runner

    def _let_expire(self, runner: Runner) -> None:
        if runner.in_flight or runner.leaving or math.isinf(runner.keep_alive):
            return
        if runner.expiry is not None:
            runner.expiry.cancel()
            runner.expiry = None
        if runner.keep_alive > 0:
            loop = asyncio.get_running_loop()
            runner.expiry = loop.call_later(runner.keep_alive, self._expired, runner)
        else:
            self._expired(runner)

    def _expired(self, runner: Runner) -> None:
        runner.leaving = True
        self._spawn(self._unload(runner))

    async def _unload(self, runner: Runner) -> None:
        await asyncio.sleep(self.unload_seconds)
        del self._runners[runner.model.name]
        runner.gone.set()
        await asyncio.sleep(self.memory_lag_seconds)
        self._usage.hold(-runner.model.size_bytes)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
