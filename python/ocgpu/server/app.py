"""The control plane: our own endpoints on Litestar. Relayed requests never come here."""

from typing import Any, Final

from litestar import Litestar, Request, Response, post, route
from litestar.enums import HttpMethod
from litestar.exceptions import HTTPException
from litestar.openapi import OpenAPIConfig, ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.types import ControllerRouterHandler, Message, Scope

import ocgpu
from ocgpu.server import handlers
from ocgpu.server.documents import (
    EventDocument,
    HealthDocument,
    PeersDocument,
    RefusalDocument,
    ReleasedDocument,
    UnloadedDocument,
)
from ocgpu.server.handlers import Knowledge
from ocgpu.server.refusal import RefusedError

__all__ = ["make_app"]

# Litestar adds the charset.
_METRICS_TYPE: Final = "text/plain; version=0.0.4"
_TOKEN: Final = "ADMIN_TOKEN"  # noqa: S105  # the name of one, not a secret itself
_BEARER: Final = SecurityScheme("http", scheme="bearer")
_LOOK: Final = (HttpMethod.GET, HttpMethod.HEAD)
# For a browser: an answer of ours is no script of another page, no frame in it, and kept nowhere.
_HARDENING: Final = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


def _refusal(meaning: str) -> ResponseSpec:
    return ResponseSpec(RefusalDocument, description=meaning, generate_examples=False)


# What the guard in front of the app and the listener answer.
_GUARDED: Final = {
    400: _refusal("a request whose meaning is unclear, such as one with two Hosts"),
    403: _refusal("an unknown Host, or a page of another origin"),
}
_ASKED: Final = _GUARDED | {401: _refusal("`ADMIN_TOKEN` is set and was not sent")}
_COMMAND: Final = _ASKED | {503: _refusal("the card did not become free, or serve shuts down")}
_HEALTH: Final = _GUARDED | {
    503: ResponseSpec(HealthDocument, description="serve shuts down", generate_examples=False)
}


def make_app(known: Knowledge) -> Litestar:
    """Build the control plane over what the server knows."""
    routes: list[ControllerRouterHandler] = [*_readers(known), *_commands(known)]
    return Litestar(
        routes,
        before_send=[_harden],
        openapi_config=OpenAPIConfig(
            title="ocgpu serve",
            version=ocgpu.__version__,
            path="/ocgpu/schema",
            # As JSON alone: the pages that Litestar knows load their scripts from a CDN.
            render_plugins=[JsonRenderPlugin()],
            use_handler_docstrings=True,
            components=Components(
                security_schemes={_TOKEN: SecurityScheme("http", scheme="bearer")}
            ),
            security=[{_TOKEN: []}, {}],
        ),
        logging_config=None,
        exception_handlers={RefusedError: _refused, HTTPException: _http_error},
    )


def _readers(known: Knowledge) -> list[ControllerRouterHandler]:
    @route("/healthz", http_method=_LOOK, sync_to_thread=False, responses=_HEALTH)
    def healthz() -> Response[HealthDocument]:
        """Say how serve is; 503 only while it shuts down."""
        status, document = handlers.health(known)
        return Response(document, status_code=status)

    @route("/metrics", http_method=_LOOK, responses=_ASKED, media_type=_METRICS_TYPE)
    async def metrics() -> str:
        """Give all numbers in Prometheus's text format."""
        return await handlers.metrics_text(known)

    @route("/gpu/peers", http_method=_LOOK, responses=_ASKED)
    async def peers() -> PeersDocument:
        """Show the peers and the lease of the GPU."""
        return await handlers.peers(known)

    @route("/events", http_method=_LOOK, sync_to_thread=False, responses=_ASKED)
    def events() -> list[EventDocument]:
        """Show the last changes of the lock's state, oldest first."""
        return handlers.events(known)

    @route("/", http_method=_LOOK, sync_to_thread=False, responses=_ASKED, media_type="text/plain")
    def index() -> str:
        """List the endpoints."""
        return handlers.index()

    return [healthz, metrics, peers, events, index]


def _commands(known: Knowledge) -> list[ControllerRouterHandler]:
    @post("/gpulock/release", status_code=200, sync_to_thread=False, responses=_ASKED)
    def release() -> ReleasedDocument:
        """Reset the lock by force; owners in flight no longer count."""
        return handlers.release(known)

    @post("/gpulock/unload", status_code=200, responses=_COMMAND)
    async def unload() -> UnloadedDocument:
        """Take everything off the card, after what runs has ended."""
        return await handlers.unload(known)

    return [release, unload]


async def _harden(message: Message, _scope: Scope) -> None:
    if message["type"] == "http.response.start":
        message["headers"] = [*message["headers"], *_HARDENING]


def _refused(_request: Request[Any, Any, Any], error: RefusedError) -> Response[RefusalDocument]:
    return Response(
        {"error": error.message, "reason": error.reason},
        status_code=503,
        headers={"retry-after": str(error.retry_after)},
    )


def _http_error(
    _request: Request[Any, Any, Any], error: HTTPException
) -> Response[RefusalDocument]:
    return Response(
        {"error": error.detail, "reason": "request"},
        status_code=error.status_code,
        headers=error.headers,
    )
