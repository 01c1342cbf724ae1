"""Ollama: its routes, its Host and Origin rule, what needs the card; llama-server in its place."""

import contextlib
import json
import logging
import re
from typing import Any, Final

import msgspec

from ocgpu.server.arbiter import Kind
from ocgpu.server.engines import ollama_unload
from ocgpu.server.engines.llama_server import LlamaServer
from ocgpu.server.engines.ollama_unload import NoModelListError, Unloaded
from ocgpu.server.engines.origins import KnownHosts
from ocgpu.server.relay.asgi import Headers, header
from ocgpu.server.relay.control import Control
from ocgpu.server.relay.upstream import UpstreamError
from ocgpu.server.routes import RouteTable

__all__ = ["Ollama"]

logger: Final = logging.getLogger("ocgpu.server")

ROUTES: Final = RouteTable(
    exact={
        "/api/generate": Kind.LLM,
        "/api/chat": Kind.LLM,
        "/api/embed": Kind.LLM,
        "/api/embeddings": Kind.LLM,
        "/v1/chat/completions": Kind.LLM,
        "/v1/completions": Kind.LLM,
        "/v1/embeddings": Kind.LLM,
        "/v1/responses": Kind.LLM,
        "/v1/messages": Kind.LLM,
        "/v1/audio/transcriptions": Kind.LLM,
        "/api/show": None,
        "/api/create": None,
        "/api/pull": None,
        "/api/push": None,
        "/api/copy": None,
        "/api/me": None,
        "/api/signout": None,
        "/api/experimental/web_search": None,
        "/api/experimental/web_fetch": None,
    },
    passing=("/api/blobs/",),
    locked=(("/api/", Kind.LLM), ("/v1/", Kind.LLM)),
)

_PROBE_SECONDS: Final = 3.0
# A model is read from disk into the card: minutes, on a slow disk.
_WARM_SECONDS: Final = 600.0
_ZERO_DURATION: Final = re.compile(r"[+-]?(0+(\.0*)?(ns|us|µs|ms|s|m|h))+|0+")


# Only the values of the fields that tell a command from work are parsed.
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TELLING: Final = ("model", "keep_alive", "prompt", "messages")
_NOTHING: Final[tuple[object, ...]] = (None, "", [])


class Ollama:
    """One Ollama behind the proxy.

    Args:
        control: Calls to it.
        hosts: Names, besides those of every machine, under which its listener is reached.
    """

    name: Final = "ollama"
    routes: Final = ROUTES

    def __init__(self, control: Control, hosts: tuple[str, ...] = ()) -> None:
        self._control = control
        self._authority = control.upstream.authority
        self._hosts = KnownHosts(hosts)
        self._llama_server = LlamaServer(control)
        # Whether that is what answers; None while nothing has answered.
        self._is_llama_server: bool | None = None
        self._listless = False

    @property
    def url(self) -> str:
        """Where it is."""
        return self._control.upstream.url

    def headers(self, headers: Headers) -> Headers:
        """Put the upstream's Host in; drop an Origin that is our own listener's.

        On loopback, Ollama refuses a public Host and every Origin outside its list. An Origin equal
        to the Host that the client used is a page that we served ourselves, if that Host is ours;
        any other one passes, so that OLLAMA_ORIGINS stays in force.
        """
        kept = [h for h in headers if h[0] != b"host"]
        if header(kept, b"origin") is not None:
            host = (header(headers, b"host") or b"").lower()
            own = (b"http://" + host, b"https://" + host) if host in self._hosts else ()
            kept = [h for h in kept if h[0] != b"origin" or h[1].lower() not in own]
        return [(b"host", self._authority), *kept]

    def needs_lock(self, kind: Kind, path: str, body: bytes) -> bool:
        """Let unload commands pass, which free the card, and cloud models, which do not use it."""
        if kind is not Kind.LLM:
            return True
        try:
            command = _command(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return True
        return _uses_card(path, command) or _says_twice(body)

    async def quiet(self) -> None:
        """Wait until nothing is computed for a client that has left.

        Ollama stops at once when a client leaves; llama-server goes on where it does not stream.
        """
        if self._is_llama_server is None:
            with contextlib.suppress(UpstreamError):
                await self.probe()
        if self._is_llama_server:
            await self._llama_server.quiet()

    async def probe(self) -> str:
        """Give Ollama's version, or llama-server's build."""
        reply = await self._control.get("/api/version", timeout=_PROBE_SECONDS)
        version = (reply.document() or {}).get("version")
        if isinstance(version, str):
            self._is_llama_server = False
            return version
        build = await self._llama_server.version(reply)
        self._is_llama_server = build is not None
        if build is None:
            raise UpstreamError(f"no version from {self._control.upstream.url}: {reply.status}")
        return build

    async def loaded(self, *, timeout: float) -> list[str]:
        """Give the names of the models on the card.

        Raises:
            UpstreamError: Ollama does not say.
        """
        return await ollama_unload.loaded(self._control, timeout=timeout)

    async def unload(self, timeout: float) -> Unloaded:
        """Take all models off the card, or give up: an image job is not held up by a neighbour.

        Args:
            timeout: Seconds for all of it.
        """
        try:
            return await ollama_unload.unload(self._control, timeout)
        except NoModelListError as error:
            if not self._listless:
                self._listless = True
                logger.warning("%s: nothing there is unloaded for images", error)
            return Unloaded([], empty=False, timed_out=False, seconds=0.0)

    async def warm(self, model: str) -> bool:
        """Load a model and keep it."""
        request = {"model": model, "prompt": "", "keep_alive": -1, "stream": False}
        reply = await self._control.post("/api/generate", request, timeout=_WARM_SECONDS)
        return reply.accepted


def _uses_card(path: str, command: dict[str, Any]) -> bool:
    if isinstance(command.get("model"), str) and _is_cloud(command["model"]):
        return False
    if not _is_zero(command.get("keep_alive")):
        return True
    if path == "/api/generate":
        return command.get("prompt") not in _NOTHING
    return not (path == "/api/chat" and command.get("messages") in _NOTHING)


def _says_twice(body: bytes) -> bool:
    """Whether a telling field stands there twice: in Go, a null leaves the text before it."""
    names: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> None:
        # Called for each object, for the outermost one last.
        names[:] = [name for name, _ in pairs]

    try:
        json.loads(body.decode("utf-8", "replace"), object_pairs_hook=note)
    except (ValueError, RecursionError):
        return True
    return any(names.count(name) > 1 for name in _TELLING)


def _is_cloud(model: str) -> bool:
    _, _, tag = model.rpartition("/")[2].partition(":")
    return tag == "cloud" or tag.endswith("-cloud")


def _is_zero(keep_alive: object) -> bool:
    if isinstance(keep_alive, str):
        return _ZERO_DURATION.fullmatch(keep_alive) is not None
    return isinstance(keep_alive, int | float) and keep_alive == 0 and keep_alive is not False


def _command(body: bytes) -> dict[str, Any]:
    """Give the telling fields of a body, as Go reads them: letter case aside, the last one wins.

    Raises:
        msgspec.DecodeError: It is no object, or two readers could differ about it.
    """
    fields = _FIELDS.decode(body)
    command: dict[str, Any] = {}
    for key, value in fields.items():
        name = key.casefold()
        if name in command:
            raise msgspec.DecodeError(f"two spellings of one field: {name}")
        if name in _TELLING:
            command[name] = msgspec.json.decode(value)
    return command
