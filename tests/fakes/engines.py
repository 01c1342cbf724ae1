"""Both fakes in a thread with a loop of its own, so that tests may use blocking clients."""

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from ocgpu.simulators.hosting import Simulator
from tests.fakes.comfy import FakeComfy
from tests.fakes.ollama import FakeOllama
from tests.fakes.oracle import Oracle
from tests.fakes.record import Record

__all__ = ["Engines"]

T = TypeVar("T")


class Engines:
    """An Ollama and a ComfyUI that share one record and one oracle.

    Attributes:
        record: Every call to either.
        oracle: Every use of the card.
        ollama: The one.
        comfy: The other.
    """

    def __init__(self) -> None:
        self.record = Record()
        self.oracle = Oracle()
        self.ollama = FakeOllama(self.record, self.oracle)
        self.comfy = FakeComfy(self.record, self.oracle)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fakes", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.run(self.ollama.start())
        self.run(self.comfy.start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.run(self.ollama.stop())
        self.run(self.comfy.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], watchdog: float = 10.0) -> T:
        """Run `work` in the fakes' loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(watchdog)

    def kill(self, fake: Simulator) -> None:
        """End `fake`: its memory is free at once, then connections are refused, all is lost."""
        self.run(fake.close())
        self.run(fake.stop())

    def restart(self, fake: Simulator) -> None:
        """Start a killed `fake` on its old port."""
        self.run(fake.start(fake.host, fake.port))
