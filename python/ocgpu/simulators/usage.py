"""What one simulated engine holds of the card, told to whoever watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Usage"]


class Usage:
    """The truth about one engine's use of the card, which no HTTP answer can hide.

    Args:
        kind: `llm` or `image`.

    Attributes:
        kind: As given.
        resident_bytes: Bytes of the card's memory that the engine holds now, loading included.
        computing: Number of computations that run on the card now.
        watch: Called with this object after each change, in the simulator's loop; None for nobody.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.resident_bytes = 0
        self.computing = 0
        self.watch: Callable[[Usage], None] | None = None

    def hold(self, size: int) -> None:
        """Take `size` bytes of the card's memory; a negative number gives them back."""
        self.resident_bytes += size
        self._changed()

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Count one computation while the block runs."""
        self.computing += 1
        self._changed()
        try:
            yield
        finally:
            self.computing -= 1
            self._changed()

    def _changed(self) -> None:
        if self.watch is not None:
            self.watch(self)
