"""What serve knows of its upstreams without asking them while somebody waits."""

import asyncio
import logging
import time
from typing import Any, Final

from ocgpu.server.engines.engine import Engine
from ocgpu.server.relay.upstream import Upstream, UpstreamError

__all__ = ["Probes"]

logger: Final = logging.getLogger("ocgpu.server")
# A health check every few seconds must not become a request to the engine every few seconds.
_STALE_SECONDS: Final = 15.0
# An engine that is down costs nothing to ask, and somebody waits for it to come back.
_STALE_DOWN_SECONDS: Final = 2.0
# What a failing request told is not told again by the next hundred.
_DOUBT_SECONDS: Final = 1.0


class _Probe:
    def __init__(self, engine: Engine, upstream: Upstream) -> None:
        self.engine = engine
        self.url = upstream.url
        self.reachable: bool | None = None
        self.version: str | None = None
        self.error: str | None = None
        self.at: float | None = None

    async def run(self) -> None:
        before = self.reachable
        try:
            self.version = await self.engine.probe()
            self.reachable, self.error = True, None
        except UpstreamError as error:
            self.reachable, self.error = False, str(error)
        self.at = time.monotonic()
        if self.reachable == before:
            return
        fields = {"upstream": self.engine.name, "url": self.url}
        if self.reachable:
            logger.info("upstream answers", extra={**fields, "version": self.version})
        else:
            logger.warning("upstream does not answer: %s", self.error, extra=fields)

    def age(self) -> float | None:
        """Seconds since the last probe ended; None before the first."""
        return None if self.at is None else time.monotonic() - self.at

    def is_stale(self) -> bool:
        """Whether the world may have changed since."""
        age = self.age()
        return age is not None and age > (_STALE_SECONDS if self.reachable else _STALE_DOWN_SECONDS)

    def document(self) -> dict[str, Any]:
        age = self.age()
        found: dict[str, Any] = {"url": self.url, "reachable": self.reachable}
        found |= {"version": self.version}
        found |= {"checked_ago_seconds": None if age is None else round(age, 3)}
        return found if self.error is None else {**found, "error": self.error}


class Probes:
    """Probes each upstream at the start, and again in the background when a reader finds it old.

    Args:
        upstreams: Engines and where they are.
    """

    def __init__(self, upstreams: list[tuple[Engine, Upstream]]) -> None:
        self._probes = [_Probe(engine, upstream) for engine, upstream in upstreams]
        self._task: asyncio.Task[Any] | None = None

    def refresh(self) -> None:
        """Begin to probe all of them, unless that is going on."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    def doubt(self, name: str) -> None:
        """Probe again, because a request to the engine of that name got no answer."""
        for probe in self._probes:
            age = probe.age()
            if probe.engine.name == name and age is not None and age > _DOUBT_SECONDS:
                self.refresh()

    def documents(self) -> dict[str, Any]:
        """Give what is known by engine name; asks again in the background when it is old."""
        if any(probe.is_stale() for probe in self._probes):
            self.refresh()
        return {probe.engine.name: probe.document() for probe in self._probes}

    async def close(self) -> None:
        """Stop probing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        await asyncio.gather(*(probe.run() for probe in self._probes))
