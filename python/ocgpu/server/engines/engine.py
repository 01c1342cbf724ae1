"""What the server asks of every engine, whatever it is."""

from typing import Protocol

from ocgpu.server.arbiter import Kind
from ocgpu.server.relay.asgi import Headers
from ocgpu.server.routes import RouteTable

__all__ = ["Engine"]


class Engine(Protocol):
    """One upstream behind a listener.

    Attributes:
        name: As it stands in logs and in `/healthz`.
        routes: What its POST requests need.
    """

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def routes(self) -> RouteTable:
        """Its routes."""

    def headers(self, headers: Headers) -> Headers:
        """Apply the engine's rule for `Host` and `Origin`."""

    def needs_lock(self, kind: Kind, path: str, body: bytes) -> bool:
        """Whether a request on a locked route needs the card, now that its body is known."""

    async def probe(self) -> str:
        """Give the engine's version.

        Raises:
            UpstreamError: It does not answer.
        """

    async def quiet(self) -> None:
        """Wait, after a client left in mid-answer, until the engine computes nothing for it.

        Returns at once for an engine that stops by itself; else bounded by the engine, and nothing
        that the engine does or says is raised.
        """
