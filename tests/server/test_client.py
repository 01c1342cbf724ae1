"""The upstream client against servers that speak raw bytes: reuse, retries, framing, refusals."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from ocgpu.server.relay.asgi import ClientGoneError
from ocgpu.server.relay.client import HttpUpstream
from ocgpu.server.relay.upstream import (
    BrokenResponseError,
    UpstreamError,
)
from tests.server.inloop import Connection, RawUpstream
from tests.server.upstreams import HEADERS, OK, Server, fetch

MIB = 2**20


@pytest.mark.parametrize(
    ("answer", "method"),
    [
        (OK, "GET"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", "GET"),
        (b"HTTP/1.1 204 No\r\n\r\n", "GET"),
        (b"HTTP/1.1 304 No\r\nContent-Length: 9\r\n\r\n", "GET"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "HEAD"),
        (b"HTTP/1.1 103 Early\r\nLink: a\r\n\r\nHTTP/1.1 100 Go\r\n\r\n" + OK, "GET"),
    ],
    ids=["length", "chunked", "204", "304", "head", "informational"],
)
async def test_a_connection_whose_answer_is_whole_is_used_again(answer: bytes, method: str) -> None:
    server = Server(answer, OK)
    async with RawUpstream(server) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        await fetch(upstream, method)
        assert await fetch(upstream) == (200, b"ok")
        await upstream.close()

    assert (raw.connections, len(server.heads)) == (1, 2)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison",
        b"HTTP/1.1 204 No\r\nContent-Length: 2\r\n\r\nok",
    ],
    ids=["close", "1.0", "bytes behind", "body where none may be"],
)
async def test_a_connection_that_cannot_be_trusted_is_not_used_again(answer: bytes) -> None:
    async with RawUpstream(Server(answer)) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        await fetch(upstream)
        assert await fetch(upstream) == (200, b"ok")
        await upstream.close()

    assert raw.connections == 2


async def test_bytes_that_come_to_an_idle_connection_end_it() -> None:
    closed = asyncio.Event()

    async def poison(connection: Connection) -> None:
        await connection.head()
        await connection.write(OK)
        await go_on.wait()
        await connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")
        await connection.rest()
        closed.set()

    go_on = asyncio.Event()
    async with RawUpstream(poison) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        await fetch(upstream)
        go_on.set()
        async with asyncio.timeout(10):
            await closed.wait()
        assert await fetch(upstream) == (200, b"ok")
        await upstream.close()

    assert raw.connections == 2


@pytest.mark.parametrize(("method", "repeated"), [("GET", True), ("PUT", True), ("POST", False)])
async def test_a_pooled_connection_that_was_closed_is_replaced_for_what_may_be_repeated(
    method: str, repeated: bool
) -> None:
    async def once(connection: Connection) -> None:
        heads.append(await connection.head())
        await connection.write(OK)
        # The next request arrives, and the connection ends without a byte.
        heads.append(await connection.head())

    heads: list[list[bytes]] = []
    async with RawUpstream(once) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        await fetch(upstream)
        body = b"" if method != "GET" else None
        if repeated:
            assert await fetch(upstream, method, body) == (200, b"ok")
        else:
            with pytest.raises(UpstreamError):
                await fetch(upstream, method, body)
        await upstream.close()

    assert len(heads) == (3 if repeated else 2)


async def test_a_request_is_not_repeated_once_a_byte_of_an_answer_came() -> None:
    async def once(connection: Connection) -> None:
        await connection.head()
        await connection.write(OK)
        await connection.head()
        await connection.write(b"HTTP/1.1 2")

    async with RawUpstream(once) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        await fetch(upstream)
        with pytest.raises(UpstreamError, match="closed the connection"):
            await fetch(upstream)
        await upstream.close()

    assert raw.connections == 1


async def test_a_fresh_request_leaves_idle_connections_alone() -> None:
    async with RawUpstream(Server()) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        await fetch(upstream)
        await fetch(upstream, "POST", b"{}", fresh=True)
        await upstream.close()

    assert raw.connections == 2


async def test_a_body_that_ends_with_the_connection_is_whole() -> None:
    async with RawUpstream(Server(b"HTTP/1.1 200 OK\r\nX: CLOSE\r\n\r\nall of it")) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        assert await fetch(upstream) == (200, b"all of it")
        await upstream.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nX: CLOSE\r\n\r\npart",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: CLOSE\r\n\r\n4\r\npart\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: CLOSE\r\n\r\n4\r\npart\r\nzz\r\n",
    ],
    ids=["length", "chunked", "no chunk"],
)
async def test_an_answer_that_breaks_off_gives_what_came_and_then_an_error(answer: bytes) -> None:
    async with RawUpstream(Server(answer)) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        async with (
            asyncio.timeout(10),
            upstream.request("GET", b"/x", HEADERS, None, fresh=True) as response,
        ):
            assert await response.read() == b"part"
            with pytest.raises(BrokenResponseError):
                await response.read()
        await upstream.close()


async def test_a_reset_ends_no_body_well() -> None:
    async def reset(connection: Connection) -> None:
        await connection.head()
        await connection.write(b"HTTP/1.1 200 OK\r\n\r\npart")
        await go_on.wait()
        linger = b"\x01\0\0\0\0\0\0\0"
        connection.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, linger
        )

    go_on = asyncio.Event()
    async with RawUpstream(reset) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        async with (
            asyncio.timeout(10),
            upstream.request("GET", b"/x", HEADERS, None, fresh=True) as response,
        ):
            assert await response.read() == b"part"
            go_on.set()
            with pytest.raises(BrokenResponseError):
                await response.read()
        await upstream.close()


HEADS = {
    "status below": (b"HTTP/1.1 099 No\r\nContent-Length: 0\r\n\r\n", "illegal status"),
    "status above": (b"HTTP/1.1 600 No\r\nContent-Length: 0\r\n\r\n", "illegal status"),
    "switch": (b"HTTP/1.1 101 Up\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "illegal status"),
    "number": (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1001 + b"\r\n", "illegal header"),
    "coding": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "transfer coding"),
    "size": (b"HTTP/1.1 200 OK\r\nX: " + b"a" * (2 * MIB) + b"\r\n\r\n", "endless head"),
    "informational": (b"HTTP/1.1 100 Go\r\n\r\n" * 60_000, "endless head"),
    "lengths": (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "no HTTP"),
    "nul": (b"HTTP/1.1 200 OK\r\nX: a\x00b\r\n\r\n", "no HTTP"),
    "no name": (b"HTTP/1.1 200 OK\r\n: x\r\n\r\n", "no HTTP"),
    "long name": (b"HTTP/1.1 200 OK\r\n" + b"a" * 32_769 + b": x\r\n\r\n", "illegal header"),
    "version": (b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n", "no HTTP/1.1"),
    "1.0 coding": (b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "transfer coding"),
    "ssh": (b"SSH-2.0-OpenSSH_9.2\r\n", "no HTTP"),
    "rubbish": (b"CLOSE", "no HTTP"),
}


@pytest.mark.parametrize("name", HEADS)
async def test_a_head_that_cannot_be_passed_on_is_refused(name: str) -> None:
    answer, message = HEADS[name]
    async with RawUpstream(Server(answer)) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        with pytest.raises(UpstreamError, match=message):
            await fetch(upstream, fresh=True)
        await upstream.close()


async def test_bytes_of_a_header_arrive_as_they_were_sent() -> None:
    server = Server(b"HTTP/1.1 200 OK\r\nX-Name: gr\xfc\xdfe\xff\r\nContent-Length: 0\r\n\r\n")
    async with RawUpstream(server) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        headers = [(b"host", b"x"), (b"x-name", b"\xe4\xff")]
        async with upstream.request("GET", b"/\xe4?\xff", headers, None, fresh=True) as response:
            assert (b"X-Name", b"gr\xfc\xdfe\xff") in response.headers
        await upstream.close()

    assert server.heads[0] == [b"GET /\xe4?\xff HTTP/1.1", b"host: x", b"x-name: \xe4\xff"]


async def test_an_early_answer_ends_the_upload() -> None:
    async def refuse(connection: Connection) -> None:
        await connection.head()
        await connection.write(b"HTTP/1.1 413 Large\r\nContent-Length: 2\r\n\r\nno")
        await connection.rest()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 1000
                await asyncio.sleep(0)
        finally:
            ended.set()

    ended = asyncio.Event()
    async with RawUpstream(refuse) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        assert await fetch(upstream, "PUT", endless()) == (413, b"no")
        async with asyncio.timeout(10):
            await ended.wait()
        await upstream.close()


async def test_a_client_that_leaves_in_its_upload_takes_the_request_with_it() -> None:
    async def left() -> AsyncIterator[bytes]:
        yield b"half"
        await arrived.wait()
        raise ClientGoneError

    async def upstream_side(connection: Connection) -> None:
        await connection.head()
        await connection.read(4)
        arrived.set()
        assert await connection.rest() == b""
        closed.set()

    arrived, closed = asyncio.Event(), asyncio.Event()
    async with RawUpstream(upstream_side) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        headers = [*HEADERS, (b"content-length", b"8")]
        with pytest.raises(ClientGoneError):
            await upstream.open("PUT", b"/x", headers, left(), fresh=True)
        async with asyncio.timeout(10):
            await closed.wait()
        await upstream.close()


async def test_an_upload_waits_for_an_upstream_that_takes_nothing() -> None:
    async def deaf(connection: Connection) -> None:
        connection.writer.transport.pause_reading()
        await asyncio.Event().wait()

    async def many() -> AsyncIterator[bytes]:
        for _ in range(1000):
            sent.append(len(sent))
            yield b"x" * MIB
        raise AssertionError("nobody took a gigabyte")

    sent: list[int] = []
    async with RawUpstream(deaf) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        opening = asyncio.ensure_future(upstream.open("PUT", b"/x", HEADERS, many(), fresh=True))
        await _standstill(sent)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await upstream.close()

    assert len(sent) < 64


async def test_reading_stops_while_nobody_takes_the_answer() -> None:
    async def flood(connection: Connection) -> None:
        await connection.head()
        await connection.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1000):
            written.append(len(written))
            await connection.write(b"x" * MIB)

    written: list[int] = []
    async with RawUpstream(flood) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        exchange = await upstream.open("GET", b"/x", HEADERS, None, fresh=True)
        await _standstill(written)
        assert len(exchange.take()) < 2 * MIB
        upstream.release(exchange)
        await upstream.close()

    assert len(written) < 64


async def test_leaving_before_the_head_ends_the_upstreams_request() -> None:
    async def silent(connection: Connection) -> None:
        await connection.head()
        asked.set()
        await connection.rest()
        closed.set()

    asked, closed = asyncio.Event(), asyncio.Event()
    async with RawUpstream(silent) as raw:
        upstream = HttpUpstream(raw.url, 1.0)
        opening = asyncio.ensure_future(upstream.open("POST", b"/x", HEADERS, b"{}", fresh=True))
        async with asyncio.timeout(10):
            await asked.wait()
            opening.cancel()
            await closed.wait()
        await asyncio.gather(opening, return_exceptions=True)
        await upstream.close()


async def _standstill(numbers: list[int]) -> None:
    """Wait until numbers came and the loop went round many times without another one."""
    async with asyncio.timeout(10):
        before = -1
        while before != len(numbers) or not numbers:
            before = len(numbers)
            for _ in range(200):
                await asyncio.sleep(0.001)
