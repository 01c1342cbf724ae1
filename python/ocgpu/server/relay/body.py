"""Read a client's request body: whole, for a request that waits, or piece by piece."""

from collections.abc import AsyncIterator, Callable

from ocgpu.server.relay.asgi import ClientGoneError, Headers, Receive, header

__all__ = ["content_length", "has_body", "next_piece", "pieces", "read_whole"]


def content_length(headers: Headers) -> int | None:
    """Give the declared length of the body in bytes, or None when it is not declared."""
    value = header(headers, b"content-length")
    return int(value) if value is not None and value.isdigit() else None


def has_body(headers: Headers) -> bool:
    """Whether a body follows the request's head."""
    return header(headers, b"transfer-encoding") is not None or bool(content_length(headers))


async def read_whole(receive: Receive, length: int) -> bytes:
    """Read all of the body.

    The message that says that nothing follows is left to the next reader of `receive`: each one is
    a way through another thread.

    Args:
        receive: The connection's `receive`.
        length: Bytes that the head announced.

    Raises:
        ClientGoneError: The client left before the end.
    """
    parts: list[bytes] = []
    size = 0
    while size != length:
        piece, _ = await next_piece(receive)
        size += len(piece)
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
        piece, more = await next_piece(receive)
        if not more and at_end is not None:
            at_end()
        if piece:
            yield piece


async def next_piece(receive: Receive) -> tuple[bytes, bool]:
    """Give the next piece of the body, and whether more follow.

    Raises:
        ClientGoneError: The client left before the end.
    """
    message = await receive()
    if message["type"] != "http.request":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)
