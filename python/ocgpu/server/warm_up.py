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
from ocgpu.server.relay.upstream import UpstreamError

__all__ = ["warm_up"]

logger: Final = logging.getLogger("ocgpu.server")

_LOOK_SECONDS: Final = 0.05


async def warm_up(admission: Admission, ollama: Ollama, model: str) -> None:
    """Load a model and have it kept; gives way to the first image that waits.

    Args:
        admission: The lock.
        ollama: Where the model is loaded.
        model: Its name.
    """
    counts = admission.counts
    if counts.state is not State.IDLE or admission.closed:
        return
    fields = {"model": model}
    with await admission.acquire(Kind.LLM):
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
