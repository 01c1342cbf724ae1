"""Learn that a client left, without a task per request.

Granian's `receive()` returns a future-like that takes a callback, which costs a fraction of a task.
Its `send()` never raises after the client has left, so `receive()` is the only place that tells,
and only while one is pending and the body was read. What it cannot tell, because bytes lie behind
the request, the kernel's table of sockets does.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from ocgpu.server.relay.asgi import Message, Receive, Scope, Send, send_whole
from ocgpu.server.relay.liveness import guard

__all__ = ["DisconnectWatch", "hang_up"]

# Most exchanges end before that, and each `receive()` is a way through another thread and back.
_DELAY_SECONDS: Final = 0.004


class DisconnectWatch:
    """Cancels a task when its client leaves.

    The cancelled task asks `gone` to tell a leaving client from a shutdown: a client that is gone
    gets no answer, so the task may end quietly.

    Args:
        receive: The connection's `receive`; its body must have been read when `arm` is called.
        task: The task to cancel.
        scope: The connection's scope; with it a client is noticed as well that left behind a
            request of its own which nobody has read.
    """

    __slots__ = (
        "_pending",
        "_receive",
        "_release",
        "_scope",
        "_stopped",
        "_task",
        "_timer",
        "gone",
    )

    def __init__(
        self, receive: Receive, task: "asyncio.Task[Any]", scope: Scope | None = None
    ) -> None:
        self._receive: Receive | None = receive
        self._task: asyncio.Task[Any] | None = task
        self._pending: Any = None
        self._scope = scope
        self._release: Callable[[], None] | None = None
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
        if self._scope is not None and self._release is None:
            self._release = guard(self._scope, self._left)

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
        release, self._release = self._release, None
        if release is not None:
            release()

    def _told(self, future: "asyncio.Future[Message]") -> None:
        self._pending = None
        if self._stopped or future.cancelled():
            return
        if future.exception() is None and future.result()["type"] == "http.request":
            self._begin()
            return
        self._left()

    def _left(self) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel()


async def hang_up(send: Send) -> None:
    """End the connection of a client that is gone and has had no answer.

    What lies behind its request would be served next, though nobody waits for it. The one client
    that sees the answer is still there: its body makes no sense, which Granian tells as a leaving.
    """
    await send_whole(send, 400, [(b"connection", b"close")], b"")


async def _awaited(awaitable: Awaitable[Message] | Coroutine[Any, Any, Message]) -> Message:
    return await awaitable
