"""The headers of a client's request as an engine shall see them."""

from ocgpu.server.engines.engine import Engine
from ocgpu.server.relay.asgi import Headers, Scope
from ocgpu.server.relay.headers import forwarded, request_headers
from ocgpu.server.trusted import TrustedProxies

__all__ = ["OutgoingHeaders"]


class OutgoingHeaders:
    """Makes them: hop-by-hop ones removed, `X-Forwarded-*` set, the engine's Host rule applied.

    Args:
        engine: Its Host rule.
        trusted: Clients whose `X-Forwarded-*` is believed.
    """

    def __init__(self, engine: Engine, trusted: TrustedProxies) -> None:
        self._engine = engine
        self._trusted = trusted

    def __call__(self, scope: Scope) -> Headers:
        """Give the headers of one request or websocket's handshake."""
        client = scope.get("client")
        trusted = client is not None and str(client[0]) in self._trusted
        return self._engine.headers(
            forwarded(request_headers(scope["headers"]), scope, trusted=trusted)
        )
