"""Ollama: its routes, its Host rule, and how its models leave the card.

Facts of Ollama's source that this rests on: an unload command answers before it unloads; `/api/ps`
may block for seconds around an unload; `keep_alive` 0 unloads embedding models as well, except in
old versions, which need `/api/embed` for that.
"""

import asyncio
import json
import logging
import re
import time
from typing import Any, Final, NamedTuple

import msgspec

from ocgpu.server.arbiter import Kind
from ocgpu.server.relay.asgi import Headers, header
from ocgpu.server.relay.control import Control
from ocgpu.server.relay.upstream import UpstreamConnectError, UpstreamError
from ocgpu.server.routes import RouteTable

__all__ = ["Ollama", "Unloaded"]

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

_POLL_SECONDS: Final = 0.5
# `/api/ps` waits for the lock that an unload holds: shorter than this would flap.
_CALL_MIN_SECONDS: Final = 2.0
_CALL_MAX_SECONDS: Final = 10.0
_PROBE_SECONDS: Final = 3.0
# A model is read from disk into the card: minutes, on a slow disk.
_WARM_SECONDS: Final = 600.0
_ZERO_DURATION: Final = re.compile(r"[+-]?(0+(\.0*)?(ns|us|µs|ms|s|m|h))+|0+")


# Only the values of the fields that tell a command from work are parsed.
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TELLING: Final = ("model", "keep_alive", "prompt", "messages")
_NOTHING: Final[tuple[object, ...]] = (None, "", [])


class Unloaded(NamedTuple):
    """What an unload came to.

    Attributes:
        models: Names of the models that were told to go.
        empty: Whether `/api/ps` was seen empty; False after a time-out or without an answer.
        seconds: How long it took.
    """

    models: list[str]
    empty: bool
    seconds: float


class Ollama:
    """One Ollama behind the proxy.

    Args:
        control: Calls to it.
    """

    name: Final = "ollama"
    routes: Final = ROUTES

    def __init__(self, control: Control) -> None:
        self._control = control
        self._authority = control.upstream.authority

    def headers(self, headers: Headers) -> Headers:
        """Put the upstream's Host in; drop an Origin that is our own listener's.

        On loopback, Ollama refuses a public Host and every Origin outside its list. An Origin equal
        to the Host that the client used is a page that we served ourselves; any other one passes,
        so that OLLAMA_ORIGINS stays in force.
        """
        host = (header(headers, b"host") or b"").lower()
        own = (b"http://" + host, b"https://" + host)
        kept = [
            h
            for h in headers
            if h[0] != b"host" and not (h[0] == b"origin" and h[1].lower() in own)
        ]
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

    async def probe(self) -> str:
        """Give Ollama's version."""
        reply = await self._control.get("/api/version", timeout=_PROBE_SECONDS)
        document = reply.document()
        if document is None:
            raise UpstreamError(f"no version from {self._control.upstream.url}: {reply.status}")
        return str(document.get("version", "unknown"))

    async def loaded(self, *, timeout: float) -> list[str]:
        """Give the names of the models on the card.

        Raises:
            UpstreamError: Ollama does not say.
        """
        reply = await self._control.get("/api/ps", timeout=timeout)
        document = reply.document()
        if document is None:
            raise UpstreamError(f"no model list from {self._control.upstream.url}: {reply.status}")
        models = document.get("models") or []
        if not isinstance(models, list):
            raise UpstreamError(f"no model list from {self._control.upstream.url}")
        names = [m.get("model") or m.get("name") for m in models if isinstance(m, dict)]
        return [name for name in names if isinstance(name, str)]

    async def unload(self, timeout: float) -> Unloaded:
        """Take all models off the card, or give up: an image job is not held up by a neighbour.

        Args:
            timeout: Seconds for all of it.
        """
        began = time.monotonic()
        deadline = began + timeout
        told: list[str] = []
        empty = False
        while not empty:
            try:
                empty = await self._unload_once(told, deadline)
            except UpstreamConnectError as error:
                logger.warning("ollama unreachable, going on without: %s", error)
                break
            except UpstreamError as error:
                logger.warning("unload: %s", error)
            left = deadline - time.monotonic()
            if not empty and left <= 0:
                logger.warning("models still loaded after %gs, going on: %s", timeout, told)
                break
            if not empty:
                await asyncio.sleep(min(_POLL_SECONDS, left))
        return Unloaded(told, empty, time.monotonic() - began)

    async def warm(self, model: str) -> bool:
        """Load a model and keep it."""
        request = {"model": model, "prompt": "", "keep_alive": -1, "stream": False}
        reply = await self._control.post("/api/generate", request, timeout=_WARM_SECONDS)
        return reply.accepted

    async def _unload_once(self, told: list[str], deadline: float) -> bool:
        """Look once, tell every model that was not told yet; True when none is loaded."""
        models = await self.loaded(timeout=_call_timeout(deadline))
        for model in models:
            if model not in told:
                told.append(model)
                await self._unload_model(model, deadline)
        return not models

    async def _unload_model(self, model: str, deadline: float) -> None:
        command = {"model": model, "keep_alive": 0}
        timeout = _call_timeout(deadline)
        reply = await self._control.post("/api/generate", command, timeout=timeout)
        if not reply.accepted:
            command = {"model": model, "input": "x", "keep_alive": 0}
            reply = await self._control.post("/api/embed", command, timeout=timeout)
        if not reply.accepted:
            logger.warning("unload of a model refused: %s", model, extra={"status": reply.status})


def _call_timeout(deadline: float) -> float:
    left = deadline - time.monotonic()
    return min(max(left, _CALL_MIN_SECONDS), _CALL_MAX_SECONDS)


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
