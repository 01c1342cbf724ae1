"""An event loop whose clock jumps: nobody waits, and time passes in the order of the timers."""

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["InstantLoop", "run_instantly", "settle"]


class _JumpingSelector(selectors.DefaultSelector):
    """Lets the clock jump where the loop would sleep."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "the loop waits for something that never comes"
        self.now += max(timeout, 0.0)
        return super().select(0)


class InstantLoop(asyncio.SelectorEventLoop):
    """The standard loop on a clock of its own."""

    def __init__(self) -> None:
        self.clock = _JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run_instantly(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `main` on an `InstantLoop`; tasks that it leaves behind are a failure."""
    loop = InstantLoop()
    with contextlib.closing(loop):
        try:
            loop.run_until_complete(main())
            left = asyncio.all_tasks(loop)
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(settle())
        assert left == set()


async def settle(turns: int = 10) -> None:
    """Let every task that can go on do so."""
    for _ in range(turns):
        await asyncio.sleep(0)
