"""Both engines behind one address; an image holds the card until the test lets it go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ocgpu.server.serve import Bound
from tests.server.inloop import Connection, RawUpstream, connect, exchange, proxy
from tests.server.requests import get, waiting

__all__ = ["Held", "chunk", "held", "metric", "request"]

OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
NOT_ACCEPTED = b"HTTP/1.1 400 No\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"


@dataclass
class Held:
    """A proxy whose card an image holds.

    Attributes:
        bound: The proxy's addresses.
        answer: All that the engine says to a request that needs the card.
        heads: The heads of those requests.
        let_go: Ends the image.
        cut: Ends the engine's connections after its answer; set from the start.
        drains: The proxy is to be stopped while the image holds the card.
    """

    answer: bytes
    heads: list[list[bytes]]
    let_go: asyncio.Event
    cut: asyncio.Event
    bound: Bound
    drains: bool = False

    @property
    def url(self) -> str:
        assert self.bound.ollama_url is not None
        return self.bound.ollama_url

    async def serve(self, connection: Connection) -> None:
        head = await connection.head()
        lengths = [line for line in head if line.lower().startswith(b"content-length:")]
        if lengths:
            await connection.read(int(lengths[0].partition(b":")[2]))
        if b"/prompt" in head[0]:
            await self.let_go.wait()
            await connection.write(NOT_ACCEPTED)
        elif head[0].startswith(b"POST"):
            self.heads.append(head)
            await connection.write(self.answer)
            await self.cut.wait()
        else:
            await connection.write(OK)

    async def open(self, data: bytes) -> Connection:
        """Send a request and do not wait for its answer."""
        client = await connect(self.url)
        await client.write(data)
        return client


@contextlib.asynccontextmanager
async def held(answer: bytes = OK, **options: object) -> AsyncIterator[Held]:
    """Serve with an image on the card; at the end the lock has to be idle and no body counted."""
    nowhere = Bound(None, None, None)
    engine = Held(answer, [], asyncio.Event(), asyncio.Event(), nowhere)
    engine.cut.set()
    async with (
        RawUpstream(engine.serve) as raw,
        proxy(raw.url, raw.url, unload_timeout=0.01, **options) as bound,
    ):
        engine.bound = bound
        image = await connect(bound.comfy_url)
        await image.write(request("/prompt"))
        await waiting(engine.url, state="image")
        try:
            yield engine
            if engine.drains:
                return
            engine.let_go.set()
            await image.rest()
            await waiting(engine.url, state="idle", waiting={"llm": 0, "image": 0, "bytes": 0})
        finally:
            await image.close()


def request(path: str, body: bytes = b"{}", *headers: bytes) -> bytes:
    """A POST."""
    lines = [b"POST " + path.encode() + b" HTTP/1.1", b"Host: x", b"Connection: close", *headers]
    lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    """One piece in the chunked transfer coding, as our listener writes it."""
    return b"%X\r\n%s\r\n" % (len(data), data)


async def metric(url: str, series: str) -> float:
    """The value of one series of `/metrics`."""
    text = (await exchange(url, get("/metrics"))).decode()
    return next(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(series)
    )
