"""The control plane: our own endpoints on Litestar. Relayed requests never come here."""

from typing import Any, Final

from litestar import Litestar, Request, Response, get, post, route
from litestar.enums import HttpMethod
from litestar.exceptions import HTTPException
from litestar.types import ControllerRouterHandler

from ocgpu.server import handlers
from ocgpu.server.admission import RefusedError
from ocgpu.server.handlers import Knowledge

__all__ = ["make_app"]

_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_LOOK: Final = (HttpMethod.GET, HttpMethod.HEAD)


def make_app(known: Knowledge) -> Litestar:
    """Build the control plane over what the server knows."""
    routes: list[ControllerRouterHandler] = [*_readers(known), *_commands(known)]
    return Litestar(
        routes,
        openapi_config=None,
        logging_config=None,
        exception_handlers={RefusedError: _refused, HTTPException: _http_error},
    )


def _readers(known: Knowledge) -> list[ControllerRouterHandler]:
    @route("/healthz", http_method=_LOOK, sync_to_thread=False)
    def healthz() -> Response[dict[str, Any]]:
        status, document = handlers.health(known)
        return Response(document, status_code=status)

    @route("/metrics", http_method=_LOOK)
    async def metrics() -> Response[str]:
        return Response(await handlers.metrics_text(known), media_type=_METRICS_TYPE)

    @route("/gpu/peers", http_method=_LOOK)
    async def peers() -> dict[str, Any]:
        return await handlers.peers(known)

    @get("/events", sync_to_thread=False)
    def events() -> list[dict[str, Any]]:
        return handlers.events(known)

    @get("/", sync_to_thread=False)
    def index() -> Response[str]:
        return Response(handlers.index(), media_type="text/plain")

    return [healthz, metrics, peers, events, index]


def _commands(known: Knowledge) -> list[ControllerRouterHandler]:
    @post("/gpulock/release", status_code=200, sync_to_thread=False)
    def release() -> dict[str, Any]:
        return known.admission.reset()

    @post("/gpulock/unload", status_code=200)
    async def unload() -> dict[str, Any]:
        return await known.unload()

    return [release, unload]


def _refused(_request: Request[Any, Any, Any], error: RefusedError) -> Response[dict[str, str]]:
    return Response(
        {"error": error.message, "reason": error.reason},
        status_code=503,
        headers={"retry-after": str(error.retry_after)},
    )


def _http_error(_request: Request[Any, Any, Any], error: HTTPException) -> Response[dict[str, str]]:
    return Response(
        {"error": error.detail, "reason": "request"},
        status_code=error.status_code,
        headers=error.headers,
    )
