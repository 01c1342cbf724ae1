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

    def document(self) -> dict[str, Any]:
        age = None if self.at is None else round(time.monotonic() - self.at, 3)
        found: dict[str, Any] = {"url": self.url, "reachable": self.reachable}
        found |= {"version": self.version, "checked_ago_seconds": age}
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

    def documents(self) -> dict[str, Any]:
        """Give what is known by engine name; asks again in the background when it is old."""
        now = time.monotonic()
        if any(probe.at is not None and now - probe.at > _STALE_SECONDS for probe in self._probes):
            self.refresh()
        return {probe.engine.name: probe.document() for probe in self._probes}

    async def close(self) -> None:
        """Stop probing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        await asyncio.gather(*(probe.run() for probe in self._probes))
