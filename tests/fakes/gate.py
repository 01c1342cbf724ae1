"""A place where a fake stops until the test lets it go on, across threads."""

import asyncio
import threading

__all__ = ["Gate"]


class Gate:
    """Closed at first; whoever comes while it is closed waits, and the test can see that.

    Attributes:
        waiting: How many are held now.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._open = False
        self._changed = threading.Condition()
        self._held: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def open(self) -> None:
        """Let everybody pass, now and later; any thread."""
        with self._changed:
            self._open = True
            for loop, event in self._held:
                loop.call_soon_threadsafe(event.set)
            self._held.clear()

    def close(self) -> None:
        """Hold everybody who comes from now on; any thread."""
        with self._changed:
            self._open = False

    def wait_reached(self, watchdog: float = 10.0, number: int = 1) -> None:
        """Block the test until `number` are held here.

        Raises:
            AssertionError: `watchdog` seconds passed.
        """
        with self._changed:
            reached = self._changed.wait_for(lambda: self.waiting >= number, watchdog)
        assert reached, f"nobody came to the gate within {watchdog} s"

    async def passing(self) -> None:
        """What a fake awaits; returns at once where the gate is open."""
        with self._changed:
            if self._open:
                return
            event = asyncio.Event()
            self._held.append((asyncio.get_running_loop(), event))
            self.waiting += 1
            self._changed.notify_all()
        try:
            await event.wait()
        finally:
            with self._changed:
                self.waiting -= 1
                self._held = [held for held in self._held if held[1] is not event]
                self._changed.notify_all()
