"""Listeners: sockets that we bind, Granian on top, and the dispatch in front of relay and app.

One ASGI callable per listener: our own paths go to the Litestar control plane, everything else to
the relay. Litestar never sees a relayed request: its router mangles paths and costs twice the CPU.

Granian's embedded server is taken with what it lacks filled in: it binds with SO_REUSEPORT (a
second instance would share the port in silence), sets no TCP keep-alive (a vanished client would
hold the lock for ever), takes 128 connections at most by default, and at its stop waits without
limit while telling neither waiters nor websockets.
"""

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from ocgpu.server.admission import RETRY_AFTER
from ocgpu.server.engines.engine import Engine
from ocgpu.server.guard import is_foreign_page, malformed, refuse
from ocgpu.server.locked import LockedRoute
from ocgpu.server.relay.asgi import App, Message, Receive, Scope, Send, send_error
from ocgpu.server.relay.headers import forwarded, request_headers
from ocgpu.server.relay.http import Outgoing, relay_http
from ocgpu.server.relay.upstream import Upstream
from ocgpu.server.relay.websocket import WebsocketRelay
from ocgpu.server.routes import lookup

__all__ = ["ControlListener", "EngineListener", "ListenerServer", "Requests", "bind", "url_of"]

logger: Final = logging.getLogger("ocgpu.server")

_BACKLOG: Final = 4096
_BACKPRESSURE: Final = 65_536
# Above the idle time-outs of front proxies (90 s in Go), so that they close first.
_HEAD_TIMEOUT_MS: Final = 120_000
# A vanished client is noticed after 15 + 3 * 5 seconds.
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
# What a kernel without IPv6 says, or one where it is switched off.
_NO_IPV6: Final = frozenset((errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL))
_LOOK: Final = frozenset(("GET", "HEAD"))


def bind(host: str, port: int) -> socket.socket:
    """Bind and listen; a port that is taken fails here, before anything has started.

    Args:
        host: IP literal; `::` takes IPv4 as well.
        port: 0 lets the kernel choose.

    Raises:
        OSError: The address is taken or not ours.
    """
    try:
        return _bind(host, port)
    except OSError as error:
        if host != "::" or error.errno not in _NO_IPV6:
            raise
    return _bind("0.0.0.0", port)  # noqa: S104  # asked for: all interfaces


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":
            # On Windows this option means what SO_REUSEPORT means elsewhere.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.settimeout(0)
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """Give a URL at which this machine reaches a bound socket."""
    host, port = listener.getsockname()[:2]
    if host in ("::", "0.0.0.0"):  # noqa: S104  # compared, not bound
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ListenerServer(Server):
    """Granian over a socket of ours. To be made and served inside a running loop.

    Args:
        app: The ASGI callable; it gets no lifespan events.
        listener: A listening socket; Granian owns and closes it from here on.
    """

    def __init__(self, app: App, listener: socket.socket) -> None:
        self._listener = listener
        host, port = listener.getsockname()[:2]
        super().__init__(
            app,
            address=host,
            port=port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            backlog=_BACKLOG,
            backpressure=_BACKPRESSURE,
            http1_settings=HTTP1Settings(header_read_timeout=_HEAD_TIMEOUT_MS),
            log_enabled=False,
        )

    def end(self) -> None:
        """Stop listening and end when no request is left."""
        self.interrupt_signal = True
        self.main_loop_interrupt.set()

    def _init_shared_socket(self) -> None:
        # A private method: granian is pinned to one minor version, and a test binds through it.
        descriptor = self._listener.detach()
        arguments: tuple[Any, ...] = (descriptor,)
        if sys.platform != "win32":
            arguments = (descriptor, False)
        if sys.platform == "linux":
            arguments = (descriptor, False, self.backlog)
        self._ssp: Any = None
        # The stub gives this constructor no arguments.
        holder: Any = SocketHolder
        self._shd: Any = holder(*arguments)


class Requests:
    """The tasks of all requests in flight, for the drain."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._websockets: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, scope: Scope, send: Send, serve: Callable[[Send], Awaitable[None]]) -> None:
        """Run one request's work and keep account of it."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request outside of a task")
        tasks = self._websockets if scope["type"] == "websocket" else self._tasks
        tasks.add(task)
        begun = False

        def noting(message: Message) -> Awaitable[None]:
            nonlocal begun
            begun = True
            return send(message)

        try:
            await serve(noting)
        except asyncio.CancelledError:
            # Ours, at the end of a drain. An answer that has begun stays without its final message:
            # the client sees that it is broken.
            if not begun and scope["type"] == "http":
                await send_error(
                    send, 503, "shutdown", "the proxy is shutting down", retry_after=RETRY_AFTER
                )
        finally:
            tasks.discard(task)

    def close_websockets(self) -> None:
        """End all websockets; their relays close them with 1001."""
        for task in list(self._websockets):
            task.cancel()

    async def drain(self, timeout: float) -> int:
        """Wait for requests to end, cut the rest; give the number that was cut.

        Args:
            timeout: Seconds.
        """
        tasks = self._tasks | self._websockets
        if not tasks:
            return 0
        _, left = await asyncio.wait(tasks, timeout=timeout)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)
        return len(left)


class EngineListener:
    """The ASGI callable of a listener with an engine behind it.

    Args:
        engine: Its routes and its Host rule.
        upstream: Its HTTP server.
        websockets: Relays websockets to it.
        locked: Serves what needs the card.
        control: The control plane.
        own: GET paths that the control plane answers on this listener.
        requests: Keeps account of what is in flight.
        special: GET paths that neither relay nor control plane answers.
        hosts: Names under which a browser may ask for what is ours.
    """

    def __init__(
        self,
        engine: Engine,
        upstream: Upstream,
        websockets: WebsocketRelay,
        locked: LockedRoute,
        control: App,
        own: frozenset[str],
        requests: Requests,
        special: dict[str, App] | None = None,
        hosts: frozenset[str] = frozenset(),
    ) -> None:
        self._engine = engine
        self._upstream = upstream
        self._websockets = websockets
        self._locked = locked
        self._control = control
        self._own = own
        self._requests = requests
        self._special = special or {}
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        await self._requests.run(scope, send, lambda noting: self._serve(scope, receive, noting))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = malformed(scope)
        if fault is not None:
            await refuse(scope, send, 400, "request", fault)
            return
        if scope["type"] == "websocket":
            headers = self._headers(scope)
            await self._websockets.relay(scope, receive, send, headers)
            return
        path = scope["path"]
        method = scope["method"]
        own = method in _LOOK and path in self._own
        special = method == "GET" and path in self._special
        foreign = (own or special) and is_foreign_page(scope["headers"], self._hosts)
        if own and foreign:
            message = "a page may not ask here under this name; add it to `ADMIN_HOSTS`"
            await refuse(scope, send, 403, "host", message)
        elif own:
            await self._control(scope, receive, send)
        elif special and not foreign:
            await self._special[path](scope, receive, send)
        else:
            kind = lookup(self._engine.routes, method, path)
            if kind is not None:
                await self._locked(scope, receive, send, self._headers(scope), kind)
            else:
                outgoing = Outgoing(self._headers(scope))
                await relay_http(scope, receive, send, self._upstream, outgoing)

    def _headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        headers = forwarded(request_headers(scope["headers"]), scope)
        return self._engine.headers(headers)


class ControlListener:
    """The ASGI callable of the admin listener: the guard, then the control plane.

    Args:
        control: The control plane.
        guard: Answers a request that is not allowed in, and says so with True.
        requests: Keeps account of what is in flight.
    """

    def __init__(
        self,
        control: App,
        guard: Callable[[Scope, Send], Awaitable[bool]],
        requests: Requests,
    ) -> None:
        self._control = control
        self._guard = guard
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._requests.run(scope, send, lambda noting: self._serve(scope, receive, noting))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000, "reason": ""})
        elif not await self._guard(scope, send):
            await self._control(scope, receive, send)
