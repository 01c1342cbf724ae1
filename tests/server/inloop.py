"""`serve()` in the test's own loop, in front of upstreams whose bytes the test writes itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ocgpu.forms import Listen
from ocgpu.server.serve import Bound, serve
from ocgpu.settings import Settings

__all__ = ["Connection", "RawUpstream", "connect", "exchange", "proxy", "read_head"]

Handler = Callable[["Connection"], Awaitable[None]]
WATCHDOG = 10.0


class Connection:
    """One connection as its bytes: to an upstream of ours, or from a client of ours."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def head(self) -> list[bytes]:
        """Read up to the blank line; the lines without their ends."""
        return await read_head(self.reader)

    async def write(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def read(self, size: int) -> bytes:
        """Read exactly so many bytes."""
        async with asyncio.timeout(WATCHDOG):
            return await self.reader.readexactly(size)

    async def rest(self) -> bytes:
        """Read until the other side closes or resets."""
        async with asyncio.timeout(WATCHDOG):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read()
        return b""

    async def close(self) -> None:
        """Close."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class RawUpstream:
    """A server whose every connection is played by a function.

    Attributes:
        connections: How many were opened.
        url: Where it is.
    """

    def __init__(self, handler: Handler) -> None:
        self.connections = 0
        self.url = ""
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "RawUpstream":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._handler(Connection(reader, writer))
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


@contextlib.asynccontextmanager
async def proxy(
    ollama_url: str = "",
    comfy_url: str = "",
    stop: asyncio.Event | None = None,
    **options: Any,  # noqa: ANN401 - any field of Settings
) -> AsyncIterator[Bound]:
    """Serve on ports of the kernel's choice; drained at the end, which must leave exit status 0.

    Who wants to look at the drain brings `stop` and sets it.
    """
    stop = stop or asyncio.Event()
    bound: asyncio.Future[Bound] = asyncio.get_running_loop().create_future()
    any_port = Listen(host="127.0.0.1", port=0)
    defaults = {
        "listen_ollama": any_port,
        "listen_comfy": any_port,
        "listen_admin": any_port,
        "drain_timeout": 1.0,
        "connect_timeout": 1.0,
    }
    settings = Settings(ollama_url=ollama_url, comfy_url=comfy_url, **{**defaults, **options})
    serving = asyncio.ensure_future(serve(settings, ready=bound.set_result, stop=stop))
    try:
        async with asyncio.timeout(WATCHDOG):
            yield await bound
    finally:
        stop.set()
        async with asyncio.timeout(WATCHDOG):
            assert await serving == 0


async def connect(url: str) -> Connection:
    """Open a connection to a listener."""
    host, port = url.removeprefix("http://").split(":")
    return Connection(*await asyncio.open_connection(host, int(port)))


async def exchange(url: str, request: bytes) -> bytes:
    """Send raw bytes, read until the other side closes."""
    client = await connect(url)
    await client.write(request)
    answer = await client.rest()
    await client.close()
    return answer


async def read_head(reader: asyncio.StreamReader) -> list[bytes]:
    """Read up to the blank line; the lines without their ends."""
    async with asyncio.timeout(WATCHDOG):
        data = await reader.readuntil(b"\r\n\r\n")
    return data[:-4].split(b"\r\n")
