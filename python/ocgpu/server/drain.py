"""The requests in flight, and their end: who comes late is refused, who stays too long is cut."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

from ocgpu.server.refusal import RETRY_AFTER
from ocgpu.server.relay.asgi import Message, Receive, Scope, Send, header, send_error

__all__ = ["Requests", "refuse"]

_CUT_SECONDS: Final = 1.0
# A client that still sends when its connection is closed may never see the answer.
_UNREAD_BYTES: Final = 65_536
_UNREAD_SECONDS: Final = 1.0
_CLOSE: Final = (b"connection", b"close")


class Requests:
    """The tasks of all requests in flight, for the drain.

    Attributes:
        closed: No new work is taken; every answer closes its connection.
    """

    def __init__(self) -> None:
        self.closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._websockets: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, scope: Scope, send: Send, serve: Callable[[Send], Awaitable[None]]) -> None:
        """Run one request's work and keep account of it."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request outside of a task")
        tasks = self._websockets if scope["type"] == "websocket" else self._tasks
        tasks.add(task)
        begun = False

        def noting(message: Message) -> Awaitable[None]:
            nonlocal begun
            begun = True
            if self.closed and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], _CLOSE]}
            return send(message)

        try:
            await serve(noting)
        except asyncio.CancelledError:
            # Ours, at the end of a drain. An answer that has begun stays without its final message:
            # the client sees that it is broken.
            if not begun:
                await _say_shutdown(scope, noting)
        finally:
            tasks.discard(task)

    def close(self) -> None:
        """Take no new work, and end all websockets; their relays close them with 1001."""
        self.closed = True
        for task in list(self._websockets):
            task.cancel()

    async def drain(self, timeout: float) -> int:
        """Wait for requests to end, cut the rest; give the number that was cut.

        Args:
            timeout: Seconds.
        """
        tasks = self._tasks | self._websockets
        if not tasks:
            return 0
        _, left = await asyncio.wait(tasks, timeout=timeout)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CUT_SECONDS)
        return len(left)


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request that came after the close."""
    if scope["type"] == "websocket":
        await receive()
    elif header(scope["headers"], b"expect") is None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_UNREAD_SECONDS):
                await _read_some(receive)
    await _say_shutdown(scope, send)


async def _read_some(receive: Receive) -> None:
    size, more = 0, True
    while more and size < _UNREAD_BYTES:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)


async def _say_shutdown(scope: Scope, send: Send) -> None:
    if scope["type"] == "http":
        text = "the proxy is shutting down"
        await send_error(send, 503, "shutdown", text, retry_after=RETRY_AFTER)
        return
    headers = [(b"retry-after", b"%d" % RETRY_AFTER)]
    await send({"type": "websocket.http.response.start", "status": 503, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": b""})
