"""Relay one HTTP exchange, byte for byte and unbuffered in both directions."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from ocgpu.server.relay import body as client_body
from ocgpu.server.relay.asgi import (
    ClientGoneError,
    Headers,
    Receive,
    Scope,
    Send,
    header,
    send_error,
    target_of,
)
from ocgpu.server.relay.headers import response_headers
from ocgpu.server.relay.upstream import (
    BrokenResponseError,
    Upstream,
    UpstreamError,
    UpstreamResponse,
)
from ocgpu.server.relay.watch import DisconnectWatch

__all__ = ["Outgoing", "StalledClientError", "relay_http", "send_response"]

# A body up to this size is read before the upstream is asked: a client that leaves is noticed from
# then on, and aiohttp sends a whole body at half the cost of one in pieces.
_SMALL_BODY: Final = 65_536
# POST and PATCH are not safe to send again, so they never meet a pooled connection's last moment.
_REPEATABLE: Final = frozenset(("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"))
_BODYLESS: Final = frozenset((204, 304))


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
    scope: Scope, receive: Receive, send: Send, upstream: Upstream, outgoing: Outgoing
) -> None:
    """Relay an exchange from head to end; the caller holds the lock if one is needed.

    A client that leaves ends the upstream's request at once. An upstream that breaks off leaves
    the client a broken response, which Granian makes of a return without a final body message.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("relay outside of a task")
    watch = DisconnectWatch(receive, task)
    coding = header(scope["headers"], b"transfer-encoding")
    if coding is not None and coding.strip().lower() != b"chunked":
        # Our listener undoes the chunked framing only, and the coding's name does not travel.
        await send_error(send, 501, "transfer_coding", "only the chunked transfer coding works")
        return
    try:
        data = await _request_body(scope, receive, outgoing, watch)
        fresh = scope["method"] not in _REPEATABLE
        async with upstream.request(
            scope["method"], target_of(scope), outgoing.headers, data, fresh=fresh
        ) as response:
            await send_response(scope, send, response, stall_timeout=outgoing.stall_timeout)
    except BrokenResponseError:
        return
    except UpstreamError as error:
        await send_error(send, 502, "upstream", str(error))
    except (ClientGoneError, StalledClientError):
        return
    except asyncio.CancelledError:
        if not watch.gone:
            raise
    finally:
        watch.stop()


async def send_response(
    scope: Scope, send: Send, response: UpstreamResponse, *, stall_timeout: float = 0.0
) -> None:
    """Send an upstream's answer on to the client, each piece as it comes.

    Raises:
        BrokenResponseError: The upstream broke off; the response must stay without its end.
        StalledClientError: The client took no byte for `stall_timeout` seconds.
    """
    await send(
        {
            "type": "http.response.start",
            "status": response.status,
            "headers": response_headers(response.headers),
        }
    )
    if scope["method"] == "HEAD" or response.status in _BODYLESS:
        await send({"type": "http.response.body", "body": b""})
        return
    piece = response.ready()
    if piece == b"":
        # Granian holds the head back until the first body message.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        piece = await response.read()
    while piece:
        await _send_piece(send, piece, stall_timeout)
        piece = await response.read()
    await send({"type": "http.response.body", "body": b""})


async def _send_piece(send: Send, piece: bytes, stall_timeout: float) -> None:
    message = {"type": "http.response.body", "body": piece, "more_body": True}
    if not stall_timeout:
        await send(message)
        return
    try:
        async with asyncio.timeout(stall_timeout):
            await send(message)
    except TimeoutError:
        raise StalledClientError from None


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
        data = await client_body.read_whole(receive, lambda _size: None)
        watch.arm()
        return data
    return client_body.pieces(receive, at_end=watch.arm)
