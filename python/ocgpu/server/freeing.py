"""The card made free: Ollama's models out, ComfyUI's memory back, both seen and not believed."""

from typing import Final, NamedTuple

from ocgpu.server.engines.comfyui import ComfyUI
from ocgpu.server.engines.ollama import Ollama
from ocgpu.server.metrics import Metrics
from ocgpu.server.settle import Settler

__all__ = ["Cleared", "Freeing"]

_LOOKS: Final = 2


class Cleared(NamedTuple):
    """What came of taking Ollama's models off the card.

    Attributes:
        models: Names of those that were told to go.
        empty: Whether none was listed in the end.
    """

    models: list[str]
    empty: bool


class Freeing:
    """Tells the engines to free the card and waits until they have.

    Args:
        ollama: None when there is none, and then it holds nothing.
        comfyui: As above.
        metrics: Takes the seconds.
        unload_timeout: Seconds for Ollama to unload.
        settle_timeout: Seconds for the memory to be back after that; 0 does not measure.
    """

    def __init__(
        self,
        ollama: Ollama | None,
        comfyui: ComfyUI | None,
        metrics: Metrics,
        *,
        unload_timeout: float,
        settle_timeout: float,
    ) -> None:
        self._ollama = ollama
        self._comfyui = comfyui
        self._metrics = metrics
        self._unload_timeout = unload_timeout
        self._settler = Settler(settle_timeout, metrics)

    async def unload_models(self) -> Cleared:
        """Take Ollama's models off the card."""
        if self._ollama is None:
            return Cleared([], empty=True)
        models: list[str] = []
        seconds = 0.0
        settling = await self._settler.begin(self._ollama.name, self._ollama.url)
        try:
            for _ in range(_LOOKS):
                done = await self._ollama.unload(max(self._unload_timeout - seconds, 0.0))
                models += done.models
                seconds += done.seconds
                # Without an empty list there is nothing to be freed. With one, memory that stays is
                # that of a model which is being loaded: once it is loaded, it is listed.
                if not done.empty or await settling.wait(told=bool(models)):
                    break
        finally:
            settling.close()
        self._metrics.unload.observe(seconds)
        self._metrics.unload_timeouts += done.timed_out
        return Cleared(models, done.empty)

    async def free_images(self) -> bool | None:
        """Have ComfyUI free its memory; whether it took that, None without a ComfyUI."""
        if self._comfyui is None:
            return None
        comfyui = self._comfyui
        settling = await self._settler.begin(comfyui.name, comfyui.url, comfyui.kept_bytes)
        try:
            freed = await comfyui.free()
            if freed:
                await settling.wait(told=True)
        finally:
            settling.close()
        return freed
