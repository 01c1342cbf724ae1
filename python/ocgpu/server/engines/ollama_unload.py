"""How Ollama's models leave the card, one unload after the other or all that refuse.

Facts of Ollama's source that this rests on: an unload command answers before it unloads, and waits
for the requests in flight; `/api/ps` may block for seconds around an unload, and does not list a
model that is being loaded; `keep_alive` 0 unloads embedding models as well, except in old versions,
which need `/api/embed` for that. `/api/embed` loads a model that is not loaded, so it is sent only
for one that was listed a moment before.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from typing import Final, NamedTuple

from ocgpu.server.relay.control import Control
from ocgpu.server.relay.upstream import UpstreamConnectError, UpstreamError

__all__ = ["NoModelListError", "Unloaded", "loaded", "unload"]

logger: Final = logging.getLogger("ocgpu.server")

_POLL_SECONDS: Final = (0.05, 0.1, 0.2, 0.5)
# `/api/ps` waits for the lock that an unload holds: shorter than this would flap.
_CALL_MIN_SECONDS: Final = 2.0
_CALL_MAX_SECONDS: Final = 10.0
# A request that came meanwhile, past the proxy, may have given a model its time back.
_AGAIN_SECONDS: Final = 2.0


class NoModelListError(UpstreamError):
    """What answers has no `/api/ps`, or none for us, and will not have one by waiting."""


# No such path: no Ollama, or one of 2023. The others: a login that the URL lacks.
_NO_LIST: Final = frozenset((401, 403, 404))


class Unloaded(NamedTuple):
    """What an unload came to.

    Attributes:
        models: Names of the models that were told to go.
        empty: Whether the list was seen empty.
        timed_out: Whether one was still listed, or no list came, when the time was over.
        seconds: How long it took.
    """

    models: list[str]
    empty: bool
    timed_out: bool
    seconds: float


async def loaded(control: Control, *, timeout: float) -> list[str]:
    """Give the names of the models on the card.

    Raises:
        NoModelListError: It has no list of models.
        UpstreamError: Ollama does not say.
    """
    reply = await control.get("/api/ps", timeout=timeout)
    if reply.status in _NO_LIST:
        raise NoModelListError(f"no `/api/ps` at {control.upstream.url}: {reply.status}")
    document = reply.document()
    if document is None:
        raise UpstreamError(f"no model list from {control.upstream.url}: {reply.status}")
    models = document.get("models") or []
    if not isinstance(models, list):
        raise UpstreamError(f"no model list from {control.upstream.url}")
    names = [m.get("model") or m.get("name") for m in models if isinstance(m, dict)]
    return [name for name in names if isinstance(name, str)]


async def unload(control: Control, timeout: float) -> Unloaded:
    """Take all models off the card, or give up: an image job is not held up by a neighbour.

    Args:
        control: Calls to Ollama.
        timeout: Seconds for all of it.

    Raises:
        NoModelListError: It has no list of models.
    """
    began = time.monotonic()
    work = _Unload(control, began + timeout)
    empty = timed_out = False
    looks = 0
    while not timed_out:
        try:
            empty = not await work.step()
            if empty:
                break
        except UpstreamConnectError as error:
            logger.warning("ollama unreachable, going on without: %s", error)
            break
        except NoModelListError:
            raise
        except UpstreamError as error:
            work.complain(str(error))
        left = began + timeout - time.monotonic()
        timed_out = left <= 0
        if not timed_out:
            await asyncio.sleep(min(_POLL_SECONDS[min(looks, len(_POLL_SECONDS) - 1)], left))
        looks += 1
    if timed_out:
        fields = {"models": work.listed}
        logger.warning("models still loaded after %gs, going on", timeout, extra=fields)
    return Unloaded(list(work.models), empty, timed_out, time.monotonic() - began)


class _Unload:
    """One unload of everything.

    Attributes:
        models: Every model that was told to go, in order.
        listed: What the last list held.
    """

    def __init__(self, control: Control, deadline: float) -> None:
        self.models: dict[str, None] = {}
        self.listed: list[str] = []
        self._control = control
        self._deadline = deadline
        self._told_at: dict[str, float] = {}
        self._complaints: set[str] = set()

    async def step(self) -> bool:
        """Look once and tell every listed model that was not told of late; False for none listed.

        Raises:
            UpstreamError: Ollama does not say.
        """
        self.listed = await self._loaded()
        now = time.monotonic()
        # One that has left and come back is told again.
        self._told_at = {m: at for m, at in self._told_at.items() if m in self.listed}
        due = [m for m in self.listed if now - self._told_at.get(m, -math.inf) >= _AGAIN_SECONDS]
        _raise_first(await asyncio.gather(*map(self._tell, due), return_exceptions=True))
        return bool(self.listed)

    def complain(self, message: str) -> None:
        """Log what went wrong, the first time as a warning."""
        level = logging.DEBUG if message in self._complaints else logging.WARNING
        self._complaints.add(message)
        logger.log(level, "unload: %s", message)

    async def _tell(self, model: str) -> None:
        self.models[model] = None
        self._told_at[model] = time.monotonic()
        # Without an answer in time it waits for Ollama's lock, and is taken when that is free.
        status = await self._post("/api/generate", {"model": model, "keep_alive": 0})
        if status < 300 or status == 404:
            return
        if status >= 500:
            # Too busy to take it: the next look tells it again.
            self._told_at.pop(model, None)
        elif model not in await self._loaded():
            return
        else:
            status = await self._post("/api/embed", {"model": model, "input": "x", "keep_alive": 0})
        if status >= 300:
            self.complain(f"refused for {model}: {status}")

    async def _post(self, path: str, command: dict[str, object]) -> int:
        timeout = _call_timeout(self._deadline)
        return (await self._control.post(path, command, timeout=timeout)).status

    async def _loaded(self) -> list[str]:
        return await loaded(self._control, timeout=_call_timeout(self._deadline))


def _raise_first(results: Iterable[BaseException | None]) -> None:
    for result in results:
        if result is not None:
            raise result


def _call_timeout(deadline: float) -> float:
    left = deadline - time.monotonic()
    return min(max(left, _CALL_MIN_SECONDS), _CALL_MAX_SECONDS)
