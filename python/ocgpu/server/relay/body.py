"""Read a client's request body: whole, for a request that waits, or piece by piece."""

from collections.abc import AsyncIterator, Callable

from ocgpu.server.relay.asgi import ClientGoneError, Headers, Receive, header

__all__ = ["content_length", "has_body", "pieces", "read_whole"]


def content_length(headers: Headers) -> int | None:
    """Give the declared length of the body in bytes, or None when it is not declared."""
    value = header(headers, b"content-length")
    return int(value) if value is not None and value.isdigit() else None


def has_body(headers: Headers) -> bool:
    """Whether a body follows the request's head."""
    return header(headers, b"transfer-encoding") is not None or bool(content_length(headers))


async def read_whole(receive: Receive, grow: Callable[[int], None]) -> bytes:
    """Read all of the body.

    Args:
        receive: The connection's `receive`.
        grow: Told the size of every piece before it is kept; what it raises ends the reading.

    Raises:
        ClientGoneError: The client left before the end.
    """
    parts = []
    async for piece in pieces(receive):
        grow(len(piece))
        parts.append(piece)
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
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        more = message.get("more_body", False)
        piece = message.get("body", b"")
        if not more and at_end is not None:
            at_end()
        if piece:
            yield piece
