"""`WARM_MODEL`: the chat model back on the card after an image, if nobody else wants the card.

It is an LLM request of our own, and the one that gives way: a load takes minutes from a slow disk,
and an image that comes meanwhile must not wait for a model that it then has unloaded. Ollama aborts
a load whose client leaves.
"""

import asyncio
import logging
from typing import Final

from ocgpu.server.admission import Admission
from ocgpu.server.arbiter import Kind, State
from ocgpu.server.engines.ollama import Ollama
from ocgpu.server.refusal import RefusedError
from ocgpu.server.relay.upstream import UpstreamError

__all__ = ["warm_up"]

logger: Final = logging.getLogger("ocgpu.server")

_LOOK_SECONDS: Final = 0.05
_IDLE_SECONDS: Final = 0.2


async def warm_up(admission: Admission, ollama: Ollama, model: str) -> None:
    """Load a model and have it kept, as soon as nobody wants the card; gives way to an image.

    Args:
        admission: The lock.
        ollama: Where the model is loaded.
        model: Its name.
    """
    if not await _idle(admission):
        return
    fields = {"model": model}
    try:
        grant = await admission.acquire(Kind.LLM)
    except RefusedError as refusal:
        logger.info("warm model: %s", refusal.message, extra=fields)
        return
    with grant:
        load = asyncio.ensure_future(ollama.warm(model))
        try:
            while not load.done():
                if admission.counts.image_pending or admission.closed:
                    logger.info("warm model: gives way", extra=fields)
                    return
                await asyncio.wait((load,), timeout=_LOOK_SECONDS)
            if load.result():
                logger.info("warm model: loaded", extra=fields)
            else:
                logger.warning("warm model: refused", extra=fields)
        except UpstreamError as error:
            logger.warning("warm model: %s", error, extra=fields)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)


async def _idle(admission: Admission) -> bool:
    """Wait until nobody wants the card; False when an image does, which is followed by another."""
    while True:
        counts = admission.counts
        if admission.closed or counts.image_pending or counts.state is State.IMAGE:
            return False
        if counts.state is State.IDLE and not counts.waiting_llm and not counts.evicting:
            return True
        await asyncio.sleep(_IDLE_SECONDS)
