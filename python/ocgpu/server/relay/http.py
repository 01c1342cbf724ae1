"""Relay one HTTP exchange, byte for byte and unbuffered in both directions."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from ocgpu.server.relay import body as client_body
from ocgpu.server.relay.asgi import (
    ClientGoneError,
    Headers,
    Message,
    Receive,
    Scope,
    Send,
    header,
    send_error,
    target_of,
)
from ocgpu.server.relay.client import HttpUpstream, repeatable
from ocgpu.server.relay.connection import Connection
from ocgpu.server.relay.headers import response_headers
from ocgpu.server.relay.upstream import BrokenResponseError, UpstreamError
from ocgpu.server.relay.watch import DisconnectWatch, hang_up

__all__ = ["Ending", "Outgoing", "StalledClientError", "relay_http"]

# A body up to this size is read before the upstream is asked: a client that leaves is noticed from
# then on.
_SMALL_BODY: Final = 65_536


class Ending(Enum):
    """How an exchange ended."""

    DONE = "the client has the whole answer"
    REFUSED = "the client has an answer of ours, because the upstream gave none"
    BROKEN = "the upstream broke off in the middle of its answer"
    CLIENT_GONE = "the client left, or took no byte for too long"


class StalledClientError(Exception):
    """The client took no byte for `STALL_TIMEOUT` seconds."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request as the upstream shall see it.

    Attributes:
        headers: With the engine's Host rule and `X-Forwarded-*` applied, hop-by-hop ones removed.
        body: The whole body, or None to stream it from the client.
        stall_timeout: Seconds that the client may take no byte; 0 is no limit.
    """

    headers: Headers
    body: bytes | None = None
    stall_timeout: float = 0.0


async def relay_http(
    scope: Scope,
    receive: Receive,
    send: Send,
    upstream: HttpUpstream,
    outgoing: Outgoing,
    watch: DisconnectWatch | None = None,
) -> Ending:
    """Relay an exchange from head to end; the caller holds the lock if one is needed.

    A client that leaves ends the upstream's request at once. An upstream that breaks off leaves
    the client a broken response, which Granian makes of a return without a final body message.

    Args:
        scope: The connection's scope.
        receive: The connection's `receive`.
        send: The connection's `send`.
        upstream: Where the request goes.
        outgoing: The request.
        watch: The caller's own watch over this task, armed; it is stopped here.
    """
    method = scope["method"]
    if _is_coded(scope):
        message = "only the chunked transfer coding works"
        await send_error(send, 501, "transfer_coding", message)
        return Ending.REFUSED
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("relay outside of a task")
    watch = watch or DisconnectWatch(receive, task, scope)
    connection: Connection | None = None
    try:
        data = await _request_body(scope, receive, outgoing, watch)
        # What is not safe to send again must not meet a pooled connection's last moment.
        fresh = not repeatable(method, data)
        connection = await upstream.open(
            method, target_of(scope), outgoing.headers, data, fresh=fresh
        )
        await _send_response(method, send, connection, outgoing.stall_timeout)
    except BrokenResponseError:
        return Ending.BROKEN
    except UpstreamError as error:
        await send_error(send, 502, "upstream", str(error))
        return Ending.REFUSED
    except (ClientGoneError, StalledClientError):
        return await _left(send, connection)
    except asyncio.CancelledError:
        if not watch.gone:
            raise
        return await _left(send, connection)
    finally:
        watch.stop()
        if connection is not None:
            upstream.release(connection)
    return Ending.DONE


def _is_coded(scope: Scope) -> bool:
    """Whether the body comes in a coding that our listener does not undo: its name is lost."""
    coding = header(scope["headers"], b"transfer-encoding")
    return coding is not None and coding.strip().lower() != b"chunked"


async def _left(send: Send, connection: Connection | None) -> Ending:
    """End the connection of a client that left; an answer that has begun stays without its end."""
    if connection is None:
        await hang_up(send)
    return Ending.CLIENT_GONE


async def _send_response(
    method: str, send: Send, connection: Connection, stall_timeout: float
) -> None:
    """Send an upstream's answer on to the client, each piece as it comes.

    Raises:
        BrokenResponseError: The upstream broke off; the response must stay without its end.
        StalledClientError: The client took no byte for `stall_timeout` seconds.
    """
    headers = response_headers(connection.headers)
    await send({"type": "http.response.start", "status": connection.status, "headers": headers})
    if connection.complete:
        # All of it is at hand, and as long as its head says.
        await send({"type": "http.response.body", "body": connection.take()})
    else:
        await _Pump(send, connection, stall_timeout).run()


class _Pump:
    """Sends a body on to the client straight from where it arrives, without a task's turn between.

    Granian's `send` does its work when it is called; only where its channel is full it gives a
    future to wait for. Until that is done nothing is read from the upstream.
    """

    __slots__ = (
        "_begun",
        "_blocked",
        "_connection",
        "_ended",
        "_last",
        "_loop",
        "_send",
        "_stall_timeout",
        "_timer",
    )

    def __init__(self, send: Send, connection: Connection, stall_timeout: float) -> None:
        self._send = send
        self._connection = connection
        self._stall_timeout = stall_timeout
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._begun = False
        self._blocked = False
        self._last = False

    async def run(self) -> None:
        """Send all of it; see `_send_response`."""
        self._connection.sink = self._go_on
        try:
            self._go_on()
            await self._ended
        finally:
            self._connection.sink = None
            if self._timer is not None:
                self._timer.cancel()

    def _go_on(self) -> None:
        """Send what has arrived, up to the first message that has to wait."""
        connection = self._connection
        while not self._blocked and not self._ended.done():
            piece = connection.take()
            if self._last:
                self._ended.set_result(None)
            elif connection.complete:
                self._last = True
                self._put({"type": "http.response.body", "body": piece})
            elif piece or not self._begun:
                # The first one may be empty: Granian holds the head back until there is one.
                self._begun = True
                self._put({"type": "http.response.body", "body": piece, "more_body": True})
            elif connection.error is not None:
                self._ended.set_exception(connection.error)
            else:
                return

    def _put(self, message: Message) -> None:
        sending: Any = self._send(message)
        if asyncio.iscoroutine(sending):
            sending = asyncio.ensure_future(sending)
        if not hasattr(sending, "add_done_callback"):
            return
        self._blocked = True
        self._connection.pause_reading()
        if self._stall_timeout:
            self._timer = self._loop.call_later(self._stall_timeout, self._stalled)
        sending.add_done_callback(self._sent)

    def _sent(self, sending: "asyncio.Future[None]") -> None:
        self._blocked = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ended.done():
            return
        if not sending.cancelled() and (error := sending.exception()) is not None:
            self._ended.set_exception(error)
            return
        self._connection.resume_reading()
        self._go_on()

    def _stalled(self) -> None:
        if not self._ended.done():
            self._ended.set_exception(StalledClientError())


async def _request_body(
    scope: Scope, receive: Receive, outgoing: Outgoing, watch: DisconnectWatch
) -> bytes | AsyncIterator[bytes] | None:
    """Give what to send as the body, and watch the client as soon as that can tell anything."""
    headers = scope["headers"]
    if outgoing.body is not None:
        watch.arm()
        return outgoing.body
    if not client_body.has_body(headers):
        watch.arm()
        return None
    length = client_body.content_length(headers)
    if length is not None and length <= _SMALL_BODY:
        data = await client_body.read_whole(receive, length)
        watch.arm()
        return data
    return client_body.pieces(receive, at_end=watch.arm)
