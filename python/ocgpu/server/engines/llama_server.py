"""llama-server in Ollama's place: how it is told, and when it has stopped computing.

Measured: a request that is not streamed is computed to its end after its client has left, 11 s in
the case at hand. What it works on stands in `/slots`, which may be switched off, and in `/metrics`,
which has to be switched on.
"""

import asyncio
import logging
import re
import time
from typing import Final

import msgspec

from ocgpu.server.relay.asgi import header
from ocgpu.server.relay.control import Control, Reply
from ocgpu.server.relay.upstream import UpstreamConnectError, UpstreamError

__all__ = ["LlamaServer"]

logger: Final = logging.getLogger("ocgpu.server")

_CALL_SECONDS: Final = 3.0
_POLL_SECONDS: Final = (0.05, 0.1, 0.2, 0.5)
# A whole long answer on a slow card. An image waits for at most this long for an answer that
# nobody reads any more.
_QUIET_SECONDS: Final = 300.0
_PROCESSING: Final = re.compile(rb"^llamacpp:requests_processing\s+([0-9.]+)", re.MULTILINE)


class _Slot(msgspec.Struct):
    # Before 2025 a slot had a `state`, 0 for idle.
    is_processing: bool = False
    state: int = 0


_SLOTS: Final = msgspec.json.Decoder(list[_Slot])


class LlamaServer:
    """One llama-server.

    Args:
        control: Calls to it.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._told = False

    async def version(self, reply: Reply) -> str | None:
        """Give its build, or None when it is something else.

        Args:
            reply: What it answered to a request that it does not know.

        Raises:
            UpstreamError: It does not answer.
        """
        low = [(name.lower(), value) for name, value in reply.headers]
        named = (header(low, b"server") or b"").lower().startswith(b"llama.cpp")
        # Both are open without its key; the one tells nothing while a model is loaded.
        props = (await self._control.get("/props", timeout=_CALL_SECONDS)).document() or {}
        if not named and "default_generation_settings" not in props:
            return None
        build = props.get("build_info")
        return f"llama.cpp {build}" if isinstance(build, str) else "llama.cpp"

    async def quiet(self) -> None:
        """Wait until it computes nothing; give up where it does not say, or after a long time."""
        deadline = time.monotonic() + _QUIET_SECONDS
        looks = 0
        while await self._busy():
            left = deadline - time.monotonic()
            if left <= 0:
                logger.warning("llama-server computes on after %gs, going on", _QUIET_SECONDS)
                return
            await asyncio.sleep(min(_POLL_SECONDS[min(looks, len(_POLL_SECONDS) - 1)], left))
            looks += 1

    async def _busy(self) -> bool:
        try:
            busy = await self._slots()
            if busy is None:
                busy = await self._processing()
        except UpstreamConnectError:
            # Its process has ended, and what it computed with it.
            return False
        except UpstreamError as error:
            logger.debug("llama-server: %s", error)
            return True
        if busy is None and not self._told:
            self._told = True
            logger.warning(
                "llama-server does not say whether it computes: start it without `--no-slots`, or "
                "with `--metrics`; a client that leaves may have its answer computed to the end"
            )
        return bool(busy)

    async def _slots(self) -> bool | None:
        reply = await self._control.get("/slots", timeout=_CALL_SECONDS)
        if reply.status == 503:
            # It loads its model, and computes nothing yet.
            return False
        try:
            slots = _SLOTS.decode(reply.body) if reply.accepted else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            slots = None
        return None if slots is None else any(s.is_processing or s.state for s in slots)

    async def _processing(self) -> bool | None:
        reply = await self._control.get("/metrics", timeout=_CALL_SECONDS)
        found = _PROCESSING.search(reply.body) if reply.accepted else None
        return None if found is None else float(found[1]) > 0
