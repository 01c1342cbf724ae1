"""Where a simulator listens: the application, its socket, its start and its end."""

import ipaddress
from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

__all__ = ["Handler", "Middleware", "Simulator", "is_loopback"]


BODY_MAX_BYTES = 100 * 1024 * 1024
SHUTDOWN_SECONDS = 0.1


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an IP address without port, means this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Simulator:
    """One HTTP server in the running loop.

    A subclass says what it answers (`routes`, `middlewares`) and what it does besides
    (`open`, `close`).

    Attributes:
        host: Address the socket is bound to, "" before `start`.
        port: Port the socket is bound to, 0 before `start`.
    """

    def __init__(self) -> None:
        self.host = ""
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Address to reach it under, without a slash at the end."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Bind and serve; port 0 takes a free one, `url` says which.

        Raises:
            OSError: The port is taken.
        """
        app = web.Application(client_max_size=BODY_MAX_BYTES, middlewares=self.middlewares())
        app.add_routes(self.routes())
        app.on_cleanup.append(self._clean)
        # Without handler_cancellation a generation would go on after its client has left.
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS
        )
        await runner.setup()
        await self.open()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        self.host = host
        self.port = int(runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening, end what runs and forget everything; harmless when not started."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _clean(self, _app: web.Application) -> None:
        await self.close()

    def routes(self) -> Iterable[web.AbstractRouteDef]:
        """What is answered."""
        raise NotImplementedError

    def middlewares(self) -> Iterable[Middleware]:
        """What looks at each request first, outermost first."""
        return ()

    async def open(self) -> None:
        """Begin the work behind the routes; called before the socket is bound."""

    async def close(self) -> None:
        """End the work behind the routes; called when all handlers have ended."""
