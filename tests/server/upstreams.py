"""A server of canned answers, and what the tests of the upstream client ask it."""

import asyncio

from ocgpu.server.relay.client import HttpUpstream
from ocgpu.server.relay.connection import Connection as Exchange
from tests.server.inloop import Connection

__all__ = ["HEADERS", "OK", "Server", "fetch"]

HEADERS = [(b"host", b"x")]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers every request on a connection with the next of its answers, and notes heads.

    Attributes:
        heads: Request heads in order.
        closed: Set when a connection ended.
    """

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.heads: list[list[bytes]] = []
        self.closed = asyncio.Event()

    async def __call__(self, connection: Connection) -> None:
        try:
            while True:
                self.heads.append(await connection.head())
                answer = self.answers.pop(0) if self.answers else OK
                await connection.write(answer)
                if b"CLOSE" in answer:
                    return
        finally:
            self.closed.set()


async def body_of(exchange: Exchange) -> bytes:
    parts = []
    while piece := await exchange.read():
        parts.append(piece)
    return b"".join(parts)


async def fetch(
    upstream: HttpUpstream, method: str = "GET", body: object = None, *, fresh: bool = False
) -> tuple[int, bytes]:
    async with (
        asyncio.timeout(10),
        upstream.request(method, b"/x", HEADERS, body, fresh=fresh) as response,
    ):
        return response.status, await body_of(response)
