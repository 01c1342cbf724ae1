"""Read the body of a request that needs the card: whole, within bounds of memory and time.

One client must not pin what all share: the body is accounted for while it grows, each piece has to
come within `STALL_TIMEOUT`, and all of it within a bound that no honest upload meets.
"""

import asyncio
import contextlib
import time
from typing import Final

from ocgpu.server.refusal import RefusedError
from ocgpu.server.relay.asgi import ClientGoneError, Headers, Receive, header
from ocgpu.server.relay.body import content_length, next_piece
from ocgpu.server.reservation import BodyReservation

__all__ = ["read_body"]

# 64 MiB at 1 Mbit/s. A client that feeds a byte a minute would hold the memory for ever.
_UPLOAD_SECONDS: Final = 600.0
# A listener that answers and closes with bytes unread resets the connection, and the answer may be
# lost: most uploads end within this.
_LINGER_SECONDS: Final = 2.0


async def read_body(
    headers: Headers, receive: Receive, reservation: BodyReservation, stall_timeout: float
) -> bytes:
    """Read all of the body.

    Args:
        headers: The client's; a declared length that cannot be had is refused before it is sent.
        receive: The connection's `receive`.
        reservation: Grows with the body.
        stall_timeout: Seconds that the client may send nothing; 0 is no limit.

    Raises:
        ClientGoneError: The client left before the end.
        RefusedError: The body is too large, there is no memory for it now, or it is too slow.
    """
    length = content_length(headers)
    try:
        reservation.check(length or 0)
    except RefusedError:
        # With this header, the client sends nothing before it was asked to.
        await _linger(receive, more=header(headers, b"expect") is None)
        raise
    deadline = time.monotonic() + _UPLOAD_SECONDS
    whole = bytearray()
    more = True
    # The message that says that nothing follows is left to the next reader of `receive` where the
    # length says so already: each one is a way through another thread.
    while more and len(whole) != length:
        left = max(deadline - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(min(stall_timeout or left, left)):
                piece, more = await next_piece(receive)
        except TimeoutError:
            raise reservation.too_slow() from None
        try:
            reservation.grow(len(piece))
        except RefusedError:
            reservation.release()
            whole.clear()
            await _linger(receive, more=more)
            raise
        if not whole and len(piece) == length:
            return piece
        whole += piece
    return bytes(whole)


async def _linger(receive: Receive, *, more: bool) -> None:
    """Throw away what a refused client still sends, for a moment, so that it gets its answer."""
    with contextlib.suppress(TimeoutError, ClientGoneError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while more:
                _, more = await next_piece(receive)
