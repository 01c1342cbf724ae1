"""A llama-server: what it says of itself and of its slots. It computes when a test says so."""

import asyncio
from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tests.fakes.faults import FaultyFake
from tests.fakes.record import Record

__all__ = ["FakeLlama"]


class FakeLlama(FaultyFake):
    """Answers as llama-server b11434 does.

    Attributes:
        slots: What each slot says of itself; None is `--no-slots`.
        metrics: Requests that it processes; None is without `--metrics`.
        nameless: No `Server` header, as behind a gateway.
        loading: Everything but its health page is a 503.
    """

    engine = "llama-server"

    def __init__(self) -> None:
        super().__init__(Record())
        self.slots: list[dict[str, object]] | None = [{"id": 0, "is_processing": False}]
        self.metrics: int | None = None
        self.nameless = False
        self.loading = False

    def busy(self, *, working: bool) -> None:
        """Compute, or do not."""
        self.slots = [{"id": 0, "is_processing": False}, {"id": 1, "is_processing": working}]

    def routes(self) -> Iterable[web.AbstractRouteDef]:
        """Those that serve asks."""
        return [
            web.get("/health", self._health),
            web.get("/props", self._props),
            web.get("/slots", self._slots),
            web.get("/metrics", self._metrics),
            web.route("*", "/{path:.*}", self._unknown),
        ]

    def middlewares(self) -> Iterable[Middleware]:
        """Its name on every answer."""
        return (*super().middlewares(), self._name, self._load)

    @web.middleware
    async def _name(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        response.headers["Server"] = "gateway" if self.nameless else "llama.cpp"
        return response

    @web.middleware
    async def _load(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.loading:
            error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
            return web.json_response({"error": error}, status=503)
        return await handler(request)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _props(self, _request: web.Request) -> web.Response:
        settings = {"n_ctx": 4096, "params": {"n_predict": -1}}
        props = {"default_generation_settings": settings, "total_slots": 1}
        return web.json_response({**props, "build_info": "b11434-0d3b2a1"})

    async def _slots(self, _request: web.Request) -> web.Response:
        if self.slots is None:
            message = "This server does not support slots endpoint. Start it with `--slots`"
            error = {"message": message, "type": "not_supported_error", "code": 501}
            return web.json_response({"error": error}, status=501)
        return web.json_response(self.slots)

    async def _metrics(self, _request: web.Request) -> web.Response:
        if self.metrics is None:
            return web.json_response({"error": {"code": 501}}, status=501)
        lines = "# TYPE llamacpp:requests_processing gauge\n"
        return web.Response(text=f"{lines}llamacpp:requests_processing {self.metrics}\n")

    async def _unknown(self, _request: web.Request) -> web.Response:
        await asyncio.sleep(0)
        error = {"message": "File Not Found", "type": "not_found_error", "code": 404}
        return web.json_response({"error": error}, status=404)
