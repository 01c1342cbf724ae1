"""Read a client's request body: whole, for a request that waits, or piece by piece."""

import asyncio
from collections.abc import AsyncIterator, Callable

from ocgpu.server.relay.asgi import ClientGoneError, Headers, Message, Receive, header

__all__ = ["content_length", "has_body", "pieces", "read_whole"]


def content_length(headers: Headers) -> int | None:
    """Give the declared length of the body in bytes, or None when it is not declared."""
    value = header(headers, b"content-length")
    return int(value) if value is not None and value.isdigit() else None


def has_body(headers: Headers) -> bool:
    """Whether a body follows the request's head."""
    return header(headers, b"transfer-encoding") is not None or bool(content_length(headers))


async def read_whole(
    receive: Receive,
    grow: Callable[[int], None],
    stall_timeout: float = 0.0,
    length: int | None = None,
) -> bytes:
    """Read all of the body.

    Args:
        receive: The connection's `receive`.
        grow: Told the size of every piece before it is kept; what it raises ends the reading.
        stall_timeout: Seconds that the client may send nothing; 0 is no limit.
        length: Bytes that the head announced. Where all of them came, the message that says so is
            left to the next reader of `receive`: each one is a way through another thread.

    Raises:
        ClientGoneError: The client left before the end, or stalled.
    """
    parts: list[bytes] = []
    size = 0
    more = True
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as patience:
            while more and size != length:
                if stall_timeout:
                    patience.reschedule(loop.time() + stall_timeout)
                piece, more = _piece(await receive())
                grow(len(piece))
                size += len(piece)
                parts.append(piece)
    except TimeoutError:
        raise ClientGoneError from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def pieces(
    receive: Receive, at_end: Callable[[], None] | None = None
) -> AsyncIterator[bytes]:
    """Yield the body as it arrives; `at_end` is called when it is complete.

    Raises:
        ClientGoneError: The client left before the end.
    """
    more = True
    while more:
        piece, more = _piece(await receive())
        if not more and at_end is not None:
            at_end()
        if piece:
            yield piece


def _piece(message: Message) -> tuple[bytes, bool]:
    """Give the piece in a message, and whether more follow."""
    if message["type"] != "http.request":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)
