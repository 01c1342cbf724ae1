"""Requests that no usual client sends: nothing crashes, nothing goes anywhere but to the engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.server.inloop import Connection, RawUpstream, connect, exchange, proxy, read_head
from tests.server.requests import get, status_of

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Seen:
    """A proxy, what its upstream was sent, and a server elsewhere that must see nobody.

    Attributes:
        url: The Ollama listener.
        comfy: The ComfyUI listener.
        heads: Heads of the requests that came, those of our own calls aside.
        elsewhere: The authority of the other server.
    """

    def __init__(self, elsewhere: RawUpstream) -> None:
        self.url = ""
        self.comfy = ""
        self.heads: list[list[bytes]] = []
        self.elsewhere = elsewhere.url.removeprefix("http://").encode()

    async def upstream(self, connection: Connection) -> None:
        while True:
            head = await connection.head()
            if not any(line.lower() == b"user-agent: ocgpu" for line in head):
                self.heads.append(head)
            await connection.write(ANSWER)

    @property
    def lines(self) -> list[bytes]:
        return [head[0] for head in self.heads]


@asynccontextmanager
async def seeing() -> AsyncIterator[Seen]:
    """A proxy; it must be healthy at the end, and nobody may have come elsewhere."""

    async def other(connection: Connection) -> None:
        await connection.rest()

    async with RawUpstream(other) as elsewhere:
        seen = Seen(elsewhere)
        async with RawUpstream(seen.upstream) as raw, proxy(raw.url, raw.url) as bound:
            seen.url, seen.comfy = str(bound.ollama_url), str(bound.comfy_url)
            yield seen
            assert status_of(await exchange(seen.url, get("/healthz"))) == 200
        assert elsewhere.connections == 0


def ask(line: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([line, *headers, b"Connection: close", b"", b""])


@pytest.mark.parametrize("target", [b"", b"/", b"/api/chat", b"*", b"/healthz"])
async def test_a_connect_opens_no_tunnel(target: bytes) -> None:
    async with seeing() as seen:
        line = b"CONNECT %s HTTP/1.1" % (target or seen.elsewhere)

        answer = await exchange(seen.url, ask(line, b"Host: " + seen.elsewhere) + b"GET / HTTP/1.1")

        assert status_of(answer) in (400, 501)
        assert seen.lines == []


async def test_a_trace_gives_no_header_away() -> None:
    async with seeing() as seen:
        for path in (b"/x", b"/healthz"):
            line = b"TRACE %s HTTP/1.1" % path
            answer = await exchange(seen.url, ask(line, b"Host: x", b"Cookie: s3cret"))

            assert status_of(answer) == 501
            assert b"s3cret" not in answer
        assert seen.lines == []


@pytest.mark.parametrize("scheme", [b"http", b"https", b"ftp"])
async def test_an_absolute_target_goes_to_the_engine(scheme: bytes) -> None:
    async with seeing() as seen:
        line = b"GET %s://%s/api/tags?a=b HTTP/1.1" % (scheme, seen.elsewhere)

        answer = await exchange(seen.url, ask(line, b"Host: " + seen.elsewhere))

        assert status_of(answer) in (200, 400)
        assert set(seen.lines) <= {b"GET /api/tags?a=b HTTP/1.1"}


async def test_an_absolute_target_does_not_dodge_the_lock_or_our_own_paths() -> None:
    async with seeing() as seen:
        line = b"GET http://%s/healthz HTTP/1.1" % seen.elsewhere

        answer = await exchange(seen.url, ask(line, b"Host: x"))

        assert status_of(answer) == 200
        assert b'"llm_inflight"' in answer
        assert seen.lines == []


async def test_options_for_the_whole_server_goes_to_the_engine() -> None:
    async with seeing() as seen:
        answer = await exchange(seen.url, ask(b"OPTIONS * HTTP/1.1", b"Host: x"))

        assert status_of(answer) == 200
        assert seen.lines == [b"OPTIONS * HTTP/1.1"]


async def test_http_1_0_is_answered_and_closed() -> None:
    async with seeing() as seen:
        answer = await exchange(seen.url, b"GET /api/tags HTTP/1.0\r\n\r\n")

        assert status_of(answer) == 200
        assert answer.endswith(b"\r\n\r\nok"), "a length, no chunks that such a client cannot read"
        assert seen.lines == [b"GET /api/tags HTTP/1.1"]


async def test_http_1_0_gets_no_chunks() -> None:
    async def chunked(connection: Connection) -> None:
        await connection.head()
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        await connection.write(head + b"2\r\nok\r\n0\r\n\r\n")

    async with RawUpstream(chunked) as raw, proxy(raw.url) as bound:
        answer = await exchange(str(bound.ollama_url), b"GET /x HTTP/1.0\r\n\r\n")

    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body == b"ok"


async def test_http_1_0_may_keep_its_connection() -> None:
    async with seeing() as seen:
        client = await connect(seen.url)
        for _ in range(2):
            await client.write(
                b"GET /api/tags HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\n\r\n"
            )
            head = await read_head(client.reader)
            assert any(line.lower() == b"connection: keep-alive" for line in head)
            assert await client.read(2) == b"ok"
        await client.close()

        assert seen.lines == [b"GET /api/tags HTTP/1.1"] * 2


@pytest.mark.parametrize("method", [b"get", b"Get", b"pOST", b"X", b"M-SEARCH"])
async def test_a_method_goes_on_in_its_own_letters(method: bytes) -> None:
    async with seeing() as seen:
        line = method + b" /api/tags HTTP/1.1"

        answer = await exchange(seen.url, ask(line, b"Host: x", b"Content-Length: 0"))

        assert status_of(answer) == 200
        assert seen.lines == [line]


@pytest.mark.parametrize("host", [b"Host: ", b"Host:", b"Host: a b", b"Host: [::1", b"Host: \xff"])
async def test_a_strange_host_reaches_nobody_else(host: bytes) -> None:
    async with seeing() as seen:
        for url in (seen.url, seen.comfy):
            answer = await exchange(url, ask(b"GET /x HTTP/1.1", host))

            assert status_of(answer) in (200, 400, 403, 421)
        assert set(seen.lines) <= {b"GET /x HTTP/1.1"}


async def test_no_host_and_two_hosts_reach_nobody_else() -> None:
    async with seeing() as seen:
        for headers in ([], [b"Host: a", b"Host: b"]):
            answer = await exchange(seen.url, ask(b"GET /x HTTP/1.1", *headers))

            assert status_of(answer) in (200, 400)
        hosts = [sum(line.lower().startswith(b"host:") for line in head) for head in seen.heads]
        assert set(hosts) <= {1}, "the engine gets one"


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET x HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http:///x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET //" + b"a" * 100 + b"@b/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA\x00: b\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /" + b"a" * 500_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 100,
    ],
)
async def test_what_is_no_request_crashes_nobody(data: bytes) -> None:
    async with seeing() as seen:
        client = await connect(seen.url)
        client.writer.write(data)
        client.writer.write_eof()

        answer = await client.rest()

        await client.close()
        assert not answer or status_of(answer) >= 200
        assert all(line.endswith(b" HTTP/1.1") for line in seen.lines)


async def test_a_path_that_looks_like_an_authority_stays_a_path() -> None:
    async with seeing() as seen:
        line = b"GET //%s/x HTTP/1.1" % seen.elsewhere

        assert status_of(await exchange(seen.url, ask(line, b"Host: x"))) == 200
        assert seen.lines == [line]
