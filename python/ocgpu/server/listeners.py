"""Listeners: Granian on sockets of ours, and the dispatch in front of relay and app.

One ASGI callable per listener: our own paths go to the Litestar control plane, everything else to
the relay. Litestar never sees a relayed request: its router mangles paths and costs twice the CPU.

Granian's embedded server is taken with what it lacks filled in: it binds with SO_REUSEPORT (a
second instance would share the port in silence), sets no TCP keep-alive (a vanished client would
hold the lock for ever), takes 128 connections at most by default, and at its stop waits without
limit while telling neither waiters nor websockets.
"""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces, TaskImpl
from granian.http import HTTP1Settings
from granian.server.embed import Server

from ocgpu.server.drain import Requests, refuse
from ocgpu.server.endings import Endings
from ocgpu.server.engines.engine import Engine
from ocgpu.server.guard import is_foreign_page, malformed, turn_away
from ocgpu.server.locked import LockedRoute
from ocgpu.server.outgoing import OutgoingHeaders
from ocgpu.server.relay.asgi import App, Receive, Scope, Send, send_error
from ocgpu.server.relay.client import HttpUpstream
from ocgpu.server.relay.http import Outgoing, relay_http
from ocgpu.server.relay.websocket import WebsocketRelay
from ocgpu.server.routes import lookup
from ocgpu.server.sockets import BACKLOG

__all__ = ["ControlListener", "EngineListener", "ListenerServer"]

# Connections at one time; idle ones count.
_BACKPRESSURE: Final = 65_536
# Above the idle time-outs of front proxies (90 s in Go), so that they close first.
_HEAD_TIMEOUT_MS: Final = 120_000
_LOOK: Final = frozenset(("GET", "HEAD"))
# The one asks for a tunnel, the other for an echo of headers, those included that we add.
_REFUSED: Final = frozenset(("CONNECT", "TRACE"))


class ListenerServer(Server):
    """Granian over a socket of ours. To be made and served inside a running loop.

    Args:
        app: The ASGI callable; it gets no lifespan events.
        listener: A listening socket; Granian owns and closes it from here on.

    Attributes:
        started: Set when its threads run.
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
            # The other one makes tasks whose `cancel` does nothing.
            task_impl=TaskImpl.asyncio,
            backlog=BACKLOG,
            backpressure=_BACKPRESSURE,
            http1_settings=HTTP1Settings(header_read_timeout=_HEAD_TIMEOUT_MS),
            log_enabled=False,
        )
        self.started = asyncio.Event()

    def end(self) -> None:
        """Stop listening and end when no request is left."""
        self.interrupt_signal = True
        self.main_loop_interrupt.set()

    def startup(self, spawn_target: Any, target_loader: Any) -> None:  # noqa: ANN401  # Granian's
        """Start the threads; Granian calls this in the loop."""
        super().startup(spawn_target, target_loader)  # type: ignore[no-untyped-call]
        # Behind the first step of the worker's task, which starts the threads or fails.
        asyncio.get_running_loop().call_soon(self._note_start)

    def _note_start(self) -> None:
        workers: list[Any] = self.wrks
        if workers and all(worker.is_alive() for worker in workers):
            self.started.set()

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


class EngineListener:
    """The ASGI callable of a listener with an engine behind it.

    Args:
        engine: Its routes.
        upstream: Its HTTP server.
        outgoing: Makes a request's headers.
        websockets: Relays websockets to it.
        locked: Serves what needs the card.
        endings: Told how requests end.
        control: The control plane.
        own: GET paths that the control plane answers on this listener.
        requests: Keeps account of what is in flight.
        special: GET paths that neither relay nor control plane answers.
        hosts: Names under which a browser may ask for what is ours.
    """

    def __init__(
        self,
        engine: Engine,
        upstream: HttpUpstream,
        outgoing: OutgoingHeaders,
        websockets: WebsocketRelay,
        locked: LockedRoute,
        endings: Endings,
        control: App,
        own: frozenset[str],
        requests: Requests,
        special: dict[str, App] | None = None,
        hosts: frozenset[str] = frozenset(),
    ) -> None:
        self._engine = engine
        self._upstream = upstream
        self._outgoing = outgoing
        self._websockets = websockets
        self._locked = locked
        self._endings = endings
        self._control = control
        self._own = own
        self._requests = requests
        self._special = special or {}
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        await self._requests.run(scope, send, lambda noting: self._serve(scope, receive, noting))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        method = scope.get("method")
        own = method in _LOOK and path in self._own
        if fault := malformed(scope):
            await turn_away(scope, send, 400, "request", fault)
        elif own and is_foreign_page(scope["headers"], self._hosts):
            message = "a page may not ask here under this name; add it to `ADMIN_HOSTS`"
            await turn_away(scope, send, 403, "host", message)
        elif own:
            await self._control(scope, receive, send)
        elif self._requests.closed:
            await refuse(scope, receive, send)
        elif method in _REFUSED:
            await send_error(send, 501, "method", f"{method} is not for this server")
        elif scope["type"] == "websocket":
            await self._websockets.relay(scope, receive, send, self._outgoing(scope))
        else:
            await self._relay(scope, receive, send)

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        method = scope["method"]
        special = method == "GET" and path in self._special
        # A foreign page gets what the engine itself says, without what we add.
        if special and not is_foreign_page(scope["headers"], self._hosts):
            await self._special[path](scope, receive, send)
        else:
            kind = lookup(self._engine.routes, method, path)
            if kind is not None:
                await self._locked(scope, receive, send, self._outgoing(scope), kind)
            else:
                outgoing = Outgoing(self._outgoing(scope))
                ending = await relay_http(scope, receive, send, self._upstream, outgoing)
                self._endings.note(scope, ending)


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
        elif await self._guard(scope, send):
            return
        elif self._requests.closed and scope["method"] not in _LOOK:
            await refuse(scope, receive, send)
        else:
            await self._control(scope, receive, send)
