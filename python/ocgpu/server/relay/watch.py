"""Learn that a client left, without a task per request.

Granian's `receive()` returns a future-like that takes a callback, which costs a fraction of a task.
Its `send()` never raises after the client has left, so `receive()` is the only place that tells,
and only while one is pending and the body was read.
"""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, Final

from ocgpu.server.relay.asgi import Message, Receive

__all__ = ["DisconnectWatch"]

# Most exchanges end before that, and each `receive()` is a way through another thread and back.
_DELAY_SECONDS: Final = 0.004


class DisconnectWatch:
    """Cancels a task when its client leaves.

    The cancelled task asks `gone` to tell a leaving client from a shutdown: a client that is gone
    gets no answer, so the task may end quietly.

    Args:
        receive: The connection's `receive`; its body must have been read when `arm` is called.
        task: The task to cancel.
    """

    __slots__ = ("_pending", "_receive", "_stopped", "_task", "_timer", "gone")

    def __init__(self, receive: Receive, task: "asyncio.Task[Any]") -> None:
        self._receive: Receive | None = receive
        self._task: asyncio.Task[Any] | None = task
        self._pending: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self.gone = False

    def arm(self) -> None:
        """Begin to watch in a moment, if that is still of use then. Twice is harmless."""
        if self._timer is None and self._pending is None and not self._stopped:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_DELAY_SECONDS, self._begin)

    def _begin(self) -> None:
        self._timer = None
        if self._stopped or self._receive is None or self._pending is not None:
            return
        pending: Any = self._receive()
        if not hasattr(pending, "add_done_callback"):
            pending = asyncio.ensure_future(_awaited(pending))
        self._pending = pending
        pending.add_done_callback(self._told)

    def stop(self) -> None:
        """End the watch; to be called in `finally`.

        The references are dropped by hand: Granian's future is opaque to the garbage collector,
        and a cycle through it leaks some 2 KB per request.
        """
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, None
        self._receive = self._task = None
        if pending is not None:
            pending.cancel()

    def _told(self, future: "asyncio.Future[Message]") -> None:
        self._pending = None
        if self._stopped or future.cancelled():
            return
        if future.exception() is None and future.result()["type"] == "http.request":
            self._begin()
            return
        self.gone = True
        if self._task is not None:
            self._task.cancel()


async def _awaited(awaitable: Awaitable[Message] | Coroutine[Any, Any, Message]) -> Message:
    return await awaitable
