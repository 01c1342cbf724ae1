"""`ocgpu serve`: wire the parts, start the listeners, drain, exit.

One process, one event loop, one arbiter. What runs at the end of a drain is cut: an engine behind
us goes on by itself, and a restart finds a running image job again in ComfyUI's queue.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from ocgpu.addresses import is_local
from ocgpu.server import logs, signals
from ocgpu.server.admission import Admission
from ocgpu.server.app import make_app
from ocgpu.server.arbiter import Arbiter, Kind
from ocgpu.server.descriptors import raise_limit
from ocgpu.server.drain import Requests
from ocgpu.server.endings import Endings
from ocgpu.server.engines.comfyui import ComfyUI
from ocgpu.server.engines.engine import Engine
from ocgpu.server.engines.ollama import Ollama
from ocgpu.server.eviction import Evictions
from ocgpu.server.foreign_jobs import ForeignJobs
from ocgpu.server.gpu_processes import GpuProcesses
from ocgpu.server.guard import host_names, make_guard
from ocgpu.server.handlers import Knowledge
from ocgpu.server.image_job import ImageJobs, ImageSettings
from ocgpu.server.listeners import ControlListener, EngineListener, ListenerServer
from ocgpu.server.locked import LockedRoute
from ocgpu.server.metrics import Metrics
from ocgpu.server.outgoing import OutgoingHeaders
from ocgpu.server.probes import Probes
from ocgpu.server.props import Props
from ocgpu.server.registry_view import RegistryView
from ocgpu.server.relay.address import Address
from ocgpu.server.relay.asgi import App
from ocgpu.server.relay.client import HttpUpstream
from ocgpu.server.relay.control import Control
from ocgpu.server.relay.upstream import Upstream
from ocgpu.server.relay.websocket import WebsocketRelay
from ocgpu.server.residency import ELSEWHERE, Residency, lease_key
from ocgpu.server.sockets import ListenError, Sockets, open_sockets, url_of
from ocgpu.server.systemd import InheritError, Notifier, inherited_sockets
from ocgpu.server.trusted import TrustedProxies
from ocgpu.settings import Settings

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
# More than all that follows a drain can take, for the service manager.
_END_SECONDS: Final = 30.0
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
    """Serve until SIGTERM or SIGINT; a second one ends the process at once, with status 1.

    Returns:
        Exit status: 0 after a drain, 1 when a listener could not start or failed.
    """
    logs.configure(settings.log_level, settings.log_format)
    raise_limit()
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
        sockets = open_sockets(settings, inherited_sockets(os.environ))
    except (InheritError, ListenError) as error:
        logger.error("%s", error)  # noqa: TRY400  # the message says it all
        registry.close()
        return 1
    # Names are looked up: that may take as long as the resolver likes.
    local = await asyncio.to_thread(_local_engines, settings)
    if not local:
        registry.leave(ELSEWHERE)
    server = _Server(settings, registry, local)
    try:
        return await server.serve(sockets, ready, stop or asyncio.Event())
    finally:
        await server.close()
        for _, listener in sockets:
            # Granian has taken and closed it, unless it did not come to that.
            listener.close()


async def _run_until_signal(settings: Settings) -> int:
    stop = asyncio.Event()
    signals.install(stop)
    return await serve(settings, stop=stop)


def _bound(sockets: Sockets) -> Bound:
    """Give the first address of each listener."""
    urls: dict[str, str] = {}
    for name, listener in sockets:
        urls.setdefault(name, url_of(listener))
    return Bound(urls.get("ollama"), urls.get("comfy"), urls.get("admin"))


def _local_engines(settings: Settings) -> frozenset[str]:
    """Give the names of the engines that are on this machine."""
    urls = {Ollama.name: settings.ollama_url, ComfyUI.name: settings.comfy_url}
    hosts = {name: Address.parse(url).host for name, url in urls.items() if url}
    return frozenset(name for name, host in hosts.items() if is_local(host))


class _Server:
    """All parts of one `ocgpu serve`, wired. To be made inside the running loop."""

    def __init__(self, settings: Settings, registry: RegistryView, local: frozenset[str]) -> None:
        self._settings = settings
        self._local = local
        self._registry = registry
        self._notifier = Notifier(os.environ)
        self._requests = Requests()
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._metrics = Metrics()
        self._ollama_up = self._upstream(settings.ollama_url)
        self._comfy_up = self._upstream(settings.comfy_url)
        self._residency = self._lease()
        self._admission = Admission(
            Arbiter(settings.image_batch),
            self._metrics,
            max_queue=settings.max_queue,
            max_waiting_bytes=settings.max_waiting_bytes,
            on_change=self._registry.follow,
            lease=self._residency if Ollama.name in local else None,
        )
        self._ollama = (
            Ollama(Control(self._ollama_up), settings.ollama_hosts) if self._ollama_up else None
        )
        self._comfyui = ComfyUI(Control(self._comfy_up)) if self._comfy_up else None
        self._jobs = self._image_jobs()
        self._evictions = Evictions(
            self._admission,
            self._residency,
            self._jobs.card,
            self._ollama if Ollama.name in local else None,
            warm_model=settings.warm_model,
            unload_timeout=settings.unload_timeout,
        )
        self._probes = Probes(self._engines())
        self._processes = self._gpu_processes()
        self._foreign_jobs = ForeignJobs(self._admission, self._comfyui)
        self._closers += [self._jobs.close, self._evictions.close, self._probes.close]
        self._closers += [self._processes.close, self._foreign_jobs.close, self._residency.close]
        self._app: Any = make_app(self._knowledge())

    async def serve(
        self, sockets: Sockets, ready: Callable[[Bound], None] | None, stop: asyncio.Event
    ) -> int:
        """Start the listeners, wait for the end, drain."""
        self._probes.refresh()
        self._processes.start()
        await self._jobs.adopt()
        self._evictions.start()
        self._foreign_jobs.start()
        apps = self._apps()
        bound = _bound(sockets)
        named = [(name, url_of(listener)) for name, listener in sockets]
        servers = [ListenerServer(apps[name], listener) for name, listener in sockets]
        runs = [asyncio.ensure_future(server.serve()) for server in servers]
        starting = asyncio.gather(*(server.started.wait() for server in servers))
        waiting = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((*runs, starting), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                self._begin(named)
                if ready is not None:
                    ready(bound)
            done, _ = await asyncio.wait((*runs, waiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            starting.cancel()
            waiting.cancel()
            stuck = await self._drain(servers, runs)
        failed = [task for task in done if task is not waiting]
        for task in failed:
            cause = None if task.cancelled() else task.exception()
            logger.error("a listener ended: %s", cause or "without a word")
        status = 1 if failed else 0
        if stuck:
            raise StuckError(status)
        return status

    def _begin(self, named: list[tuple[str, str]]) -> None:
        """Say that connections are accepted."""
        for name, url in named:
            logger.info("listening", extra={"listener": name, "url": url})
        self._notifier.ready()

    async def close(self) -> None:
        """Give everything back; safe after a failed start."""
        for closer in self._closers:
            await closer()
        self._registry.close()

    async def _drain(self, servers: list[ListenerServer], runs: "list[asyncio.Task[None]]") -> bool:
        """End all requests and all listeners; True when a listener's thread does not end."""
        logger.info("draining", extra={"requests": len(self._requests)})
        self._notifier.stopping(self._settings.drain_timeout + _END_SECONDS)
        self._requests.close()
        self._admission.close()
        cut = await self._requests.drain(self._settings.drain_timeout)
        for server in servers:
            server.end()
        _, stuck = await asyncio.wait(runs, timeout=_STOP_SECONDS)
        logger.info("drained", extra={"cut": cut})
        return bool(stuck)

    def _image_jobs(self) -> ImageJobs:
        settings = self._settings
        return ImageJobs(
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
            self._residency,
        )

    def _gpu_processes(self) -> GpuProcesses:
        """Make the part that looks at the memory of engines here, of peers and of strangers."""
        here = [one for one in self._engines() if one[0].name in self._local]
        where = {engine.name: upstream.url for engine, upstream in here}
        registry = self._registry
        key = registry.gpu_key if self._local else None
        processes = GpuProcesses(where, key, registry.pids)
        registry.memory_of = processes.memory_of
        return processes

    def _knowledge(self) -> Knowledge:
        return Knowledge(
            admission=self._admission,
            metrics=self._metrics,
            registry=self._registry,
            residency=self._residency,
            probes=self._probes,
            processes=self._processes,
            foreign_jobs=self._foreign_jobs,
            started=time.monotonic(),
            unload=self._evictions.by_hand,
        )

    def _lease(self) -> Residency:
        """Make the part that holds the machine's lease, or that says why none is held."""
        settings = self._settings
        key, reason = lease_key(settings.gpu_key, on=settings.lease, local=bool(self._local))
        if reason is not None:
            logger.info("serving without the machine's lease: %s", reason)
        return Residency(key, reason, settings.lease_wait_timeout)

    def _apps(self) -> dict[str, App]:
        """Build the ASGI callable of every listener that may be on."""
        settings = self._settings
        guard = make_guard(settings.admin_hosts, settings.admin_token)
        apps: dict[str, App] = {"admin": ControlListener(self._app, guard, self._requests)}
        if self._ollama is not None and self._ollama_up is not None:
            outgoing = OutgoingHeaders(self._ollama, TrustedProxies(settings.trusted_proxies))
            props = Props(outgoing, self._ollama_up, self._registry.gpu_share)
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
        upstream: HttpUpstream,
        own: frozenset[str],
        special: dict[str, App],
    ) -> EngineListener:
        settings = self._settings
        websockets = WebsocketRelay(upstream.address, settings.connect_timeout)
        endings = Endings(engine.name, self._metrics)
        locked = LockedRoute(
            self._admission,
            engine,
            upstream,
            self._jobs,
            waits={Kind.LLM: settings.llm_wait_timeout, Kind.IMAGE: settings.image_wait_timeout},
            stall_timeout=settings.stall_timeout,
            endings=endings,
            wait_keepalive=settings.wait_keepalive,
        )
        upstream.on_unreachable = lambda: self._probes.doubt(engine.name)
        return EngineListener(
            engine,
            upstream,
            OutgoingHeaders(engine, TrustedProxies(settings.trusted_proxies)),
            websockets,
            locked,
            endings,
            self._app,
            own,
            self._requests,
            special,
            host_names(settings.admin_hosts),
        )

    def _upstream(self, url: str) -> HttpUpstream | None:
        if not url:
            return None
        upstream = HttpUpstream(url, self._settings.connect_timeout)
        self._closers.append(upstream.close)
        return upstream
