"""`ocgpu serve`: wire the parts, start the listeners, drain, exit.

One process, one event loop, one arbiter. What runs at the end of a drain is cut: an engine behind
us goes on by itself, and a restart finds a running image job again in ComfyUI's queue.
"""

import asyncio
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from ocgpu.server import logs
from ocgpu.server.admission import Admission
from ocgpu.server.app import make_app
from ocgpu.server.arbiter import Arbiter, Kind
from ocgpu.server.engines.comfyui import ComfyUI
from ocgpu.server.engines.engine import Engine
from ocgpu.server.engines.ollama import Ollama
from ocgpu.server.guard import make_guard
from ocgpu.server.handlers import Knowledge
from ocgpu.server.image_job import ImageJobs, ImageSettings
from ocgpu.server.listeners import (
    ControlListener,
    EngineListener,
    ListenerServer,
    Requests,
    bind,
    url_of,
)
from ocgpu.server.locked import LockedRoute
from ocgpu.server.metrics import Metrics
from ocgpu.server.probes import Probes
from ocgpu.server.props import Props
from ocgpu.server.registry_view import RegistryView
from ocgpu.server.relay.aiohttp_upstream import AiohttpUpstream
from ocgpu.server.relay.asgi import App
from ocgpu.server.relay.control import Control
from ocgpu.server.relay.upstream import Upstream
from ocgpu.server.relay.websocket import WebsocketRelay
from ocgpu.settings import Listen, Settings

new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    from uvloop import new_event_loop
except ImportError:
    # Windows: the standard loop serves.
    new_event_loop = asyncio.new_event_loop

__all__ = ["Bound", "run", "serve"]

logger: Final = logging.getLogger("ocgpu.server")

# Granian's threads end within milliseconds once no request is left; after this they are stuck.
_STOP_SECONDS: Final = 3.0
# `timeout(1)` signals its child and then the child's group: one wish, told twice.
_SAME_SIGNAL_SECONDS: Final = 0.2
_OLLAMA_OWN: Final = frozenset(("/healthz", "/metrics", "/gpu/peers"))
_COMFY_OWN: Final = frozenset(("/healthz",))


@dataclass(frozen=True, slots=True)
class Bound:
    """Where the listeners are reached; None is off."""

    ollama_url: str | None
    comfy_url: str | None
    admin_url: str | None


class StuckError(Exception):
    """A listener's thread did not end; only the end of the process ends it.

    No request is left then: a connection on which half a request came keeps Granian waiting.

    Attributes:
        status: The exit status that serving came to.
    """

    def __init__(self, status: int) -> None:
        super().__init__("a listener waits for a connection; ending the process")
        self.status = status


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends the process at once.

    Returns:
        Exit status: 0 after a drain, 1 when a listener could not start or failed.
    """
    logs.configure(settings.log_level, settings.log_format)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_run_until_signal(settings))
    except StuckError as error:
        logger.warning("%s", error)
        logging.shutdown()
        os._exit(error.status)


async def serve(
    settings: Settings,
    *,
    ready: Callable[[Bound], None] | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Serve until `stop` is set, then drain.

    Args:
        settings: All of it.
        ready: Told the addresses as soon as connections are accepted.
        stop: Ends serving; None serves until a listener fails or the task is cancelled.

    Returns:
        0 after a drain, 1 when a listener could not start or failed.

    Raises:
        ConfigError: A variable of the library (`OCGPU_…`) is outside its legal form.
        StuckError: A listener's thread did not end.
    """
    registry = RegistryView(settings.gpu_share_weight, settings.gpu_key)
    try:
        sockets = _bind_all(settings)
    except OSError:
        registry.close()
        return 1
    bound = Bound(*(_url(sockets.get(name)) for name in ("ollama", "comfy", "admin")))
    server = _Server(settings, registry)
    try:
        return await server.serve(sockets, bound, ready, stop or asyncio.Event())
    finally:
        await server.close()


async def _run_until_signal(settings: Settings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    first: float | None = None

    def told() -> None:
        nonlocal first
        now = loop.time()
        first = now if first is None else first
        if stop.is_set() and now - first < _SAME_SIGNAL_SECONDS:
            return
        if stop.is_set():
            logger.warning("second signal: ending at once")
            logging.shutdown()
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, told)
        except NotImplementedError:
            signal.signal(number, lambda *_args: loop.call_soon_threadsafe(told))
    return await serve(settings, stop=stop)


def _bind_all(settings: Settings) -> dict[str, socket.socket]:
    """Bind all listeners that are on.

    Raises:
        OSError: One could not be bound; it was logged, and the others are closed again.
    """
    wanted: dict[str, tuple[str, Listen | None]] = {
        "ollama": ("LISTEN_OLLAMA", settings.listen_ollama if settings.ollama_url else None),
        "comfy": ("LISTEN_COMFY", settings.listen_comfy if settings.comfy_url else None),
        "admin": ("LISTEN_ADMIN", settings.listen_admin),
    }
    sockets: dict[str, socket.socket] = {}
    for name, (variable, listen) in wanted.items():
        if listen is None:
            continue
        try:
            sockets[name] = bind(listen.host, listen.port)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            remedy = (
                f"stop what listens there or set `{variable}`" if taken else f"set `{variable}`"
            )
            reason = os.strerror(error.errno or 0).lower()
            logger.error("cannot listen on %s: %s; %s", listen, reason, remedy)  # noqa: TRY400
            for listener in sockets.values():
                listener.close()
            raise
    return sockets


def _url(listener: socket.socket | None) -> str | None:
    return None if listener is None else url_of(listener)


class _Server:
    """All parts of one `ocgpu serve`, wired. To be made inside the running loop."""

    def __init__(self, settings: Settings, registry: RegistryView) -> None:
        self._settings = settings
        self._registry = registry
        self._requests = Requests()
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._metrics = Metrics()
        self._admission = Admission(
            Arbiter(settings.image_batch),
            self._metrics,
            max_queue=settings.max_queue,
            max_waiting_bytes=settings.max_waiting_bytes,
            on_change=self._registry.follow,
        )
        self._ollama_up = self._upstream(settings.ollama_url)
        self._comfy_up = self._upstream(settings.comfy_url)
        self._ollama = Ollama(Control(self._ollama_up)) if self._ollama_up else None
        self._comfyui = ComfyUI(Control(self._comfy_up)) if self._comfy_up else None
        self._jobs = ImageJobs(
            self._admission,
            self._metrics,
            self._ollama,
            self._comfyui,
            self._comfy_up,
            ImageSettings(
                settings.unload_timeout,
                settings.job_timeout,
                settings.job_timeout_action,
                settings.warm_model,
                settings.settle_timeout,
            ),
        )
        self._probes = Probes(self._engines())
        self._closers += [self._jobs.close, self._probes.close]
        self._app: Any = make_app(
            Knowledge(
                admission=self._admission,
                metrics=self._metrics,
                registry=self._registry,
                probes=self._probes,
                started=time.monotonic(),
                unload=self._jobs.unload,
            )
        )

    async def serve(
        self,
        sockets: dict[str, socket.socket],
        bound: Bound,
        ready: Callable[[Bound], None] | None,
        stop: asyncio.Event,
    ) -> int:
        """Start the listeners, wait for the end, drain."""
        self._probes.refresh()
        await self._jobs.adopt()
        apps = self._apps()
        servers = [ListenerServer(apps[name], listener) for name, listener in sockets.items()]
        runs = [asyncio.ensure_future(server.serve()) for server in servers]
        waiting = asyncio.ensure_future(stop.wait())
        addresses = (bound.ollama_url, bound.comfy_url, bound.admin_url)
        for name, url in zip(("ollama", "comfy", "admin"), addresses, strict=True):
            if url is not None:
                logger.info("listening", extra={"listener": name, "url": url})
        if ready is not None:
            ready(bound)
        try:
            done, _ = await asyncio.wait((*runs, waiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            stuck = await self._drain(servers, runs)
        failed = [task for task in done if task is not waiting]
        for task in failed:
            logger.error("a listener ended: %s", task.exception() or "without a word")
        status = 1 if failed else 0
        if stuck:
            raise StuckError(status)
        return status

    async def close(self) -> None:
        """Give everything back; safe after a failed start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for closer in self._closers:
            await closer()
        self._registry.close()

    async def _drain(self, servers: list[ListenerServer], runs: "list[asyncio.Task[None]]") -> bool:
        """End all requests and all listeners; True when a listener's thread does not end."""
        logger.info("draining", extra={"requests": len(self._requests)})
        self._admission.close()
        self._requests.close_websockets()
        cut = await self._requests.drain(self._settings.drain_timeout)
        for server in servers:
            server.end()
        _, stuck = await asyncio.wait(runs, timeout=_STOP_SECONDS)
        logger.info("drained", extra={"cut": cut})
        return bool(stuck)

    def _apps(self) -> dict[str, App]:
        """Build the ASGI callable of every listener that may be on."""
        settings = self._settings
        guard = make_guard(settings.admin_hosts, settings.admin_token)
        apps: dict[str, App] = {"admin": ControlListener(self._app, guard, self._requests)}
        if self._ollama is not None and self._ollama_up is not None:
            props = Props(self._ollama, self._ollama_up, self._registry.gpu_share)
            apps["ollama"] = self._engine_listener(
                self._ollama, self._ollama_up, _OLLAMA_OWN, {"/props": props}
            )
        if self._comfyui is not None and self._comfy_up is not None:
            apps["comfy"] = self._engine_listener(self._comfyui, self._comfy_up, _COMFY_OWN, {})
        return apps

    def _engines(self) -> list[tuple[Engine, Upstream]]:
        engines: list[tuple[Engine, Upstream]] = []
        if self._ollama is not None and self._ollama_up is not None:
            engines.append((self._ollama, self._ollama_up))
        if self._comfyui is not None and self._comfy_up is not None:
            engines.append((self._comfyui, self._comfy_up))
        return engines

    def _engine_listener(
        self,
        engine: Engine,
        upstream: AiohttpUpstream,
        own: frozenset[str],
        special: dict[str, App],
    ) -> EngineListener:
        settings = self._settings
        websockets = WebsocketRelay(upstream.url, settings.connect_timeout)
        self._closers.append(websockets.close)
        locked = LockedRoute(
            self._admission,
            engine,
            upstream,
            self._jobs,
            waits={Kind.LLM: settings.llm_wait_timeout, Kind.IMAGE: settings.image_wait_timeout},
            stall_timeout=settings.stall_timeout,
        )
        return EngineListener(
            engine, upstream, websockets, locked, self._app, own, self._requests, special
        )

    def _upstream(self, url: str) -> AiohttpUpstream | None:
        if not url:
            return None
        upstream = AiohttpUpstream(url, self._settings.connect_timeout)
        self._closers.append(upstream.close)
        return upstream

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
