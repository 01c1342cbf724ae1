"""How bodies are framed on either side of the proxy, through a real listener."""

import asyncio
import ipaddress

import pytest

from tests.server.inloop import Connection, RawUpstream, connect, exchange, proxy

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
MIB = 2**20


def answering(answer: bytes, heads: list[list[bytes]] | None = None) -> object:
    async def upstream(connection: Connection) -> None:
        head = await connection.head()
        if heads is not None:
            heads.append(head)
        await connection.write(answer)

    return upstream


async def test_a_body_that_ends_with_the_connection_reaches_the_client_whole() -> None:
    upstream = answering(b"HTTP/1.1 200 OK\r\n\r\nall of it")
    async with RawUpstream(upstream) as raw, proxy(comfy_url=raw.url) as bound:
        answer = await exchange(
            bound.comfy_url, b"GET /view HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert (body, b"content-length" in head) in (
        (b"9\r\nall of it\r\n0\r\n\r\n", False),
        (b"all of it", True),
    )


async def test_informational_answers_are_not_taken_for_the_answer() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
    async with RawUpstream(answering(early + OK)) as raw, proxy(comfy_url=raw.url) as bound:
        answer = await exchange(
            bound.comfy_url, b"GET /view HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nok")
    assert b"a.css" not in answer


@pytest.mark.parametrize("kept", [b"", b"Connection: keep-alive\r\n"])
async def test_a_client_of_http_1_0_gets_the_body_without_chunks(kept: bytes) -> None:
    heads: list[list[bytes]] = []
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    async with (
        RawUpstream(answering(chunked, heads)) as raw,
        proxy(comfy_url=raw.url) as bound,
    ):
        heads.clear()
        client = await connect(bound.comfy_url)
        await client.write(b"GET /view HTTP/1.0\r\nHost: x\r\n" + kept + b"\r\n")
        head = await client.head()
        assert await client.read(2) == b"ok"
        await client.close()

    assert head[0].endswith(b" 200 OK")
    assert not [line for line in head if line.lower().startswith(b"transfer-encoding")]
    assert any(head[0] == b"GET /view HTTP/1.1" for head in heads)


@pytest.mark.parametrize("path", [b"/upload/image", b"/prompt"])
async def test_a_client_that_waits_for_100_continue_is_told_to_go_on(path: bytes) -> None:
    heads: list[list[bytes]] = []
    async with RawUpstream(answering(OK, heads)) as raw, proxy(comfy_url=raw.url) as bound:
        client = await connect(bound.comfy_url)
        await client.write(
            b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        )
        assert (await client.head())[0] == b"HTTP/1.1 100 Continue"
        await client.write(b"{}")
        assert (await client.rest()).startswith(b"HTTP/1.1 200 ")
        await client.close()

    posted = next(head for head in heads if head[0].startswith(b"POST"))
    assert not [line for line in posted if line.lower().startswith(b"expect")]


async def test_each_chunk_of_a_stream_is_a_chunk_for_the_client() -> None:
    async def upstream(connection: Connection) -> None:
        if b"/view" not in (await connection.head())[0]:
            return
        await connection.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(100):
            await sent.acquire()
            line = b"%03d\n" % number
            await connection.write(b"%x\r\n%b\r\n" % (len(line), line))
        await connection.write(b"0\r\n\r\n")

    sent = asyncio.Semaphore(1)
    async with RawUpstream(upstream) as raw, proxy(comfy_url=raw.url) as bound:
        client = await connect(bound.comfy_url)
        await client.write(b"GET /view HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await client.head()
        for number in range(100):
            # The next one is sent only when this one came: nothing holds chunks back.
            assert await client.read(9) == b"4\r\n%03d\n\r\n" % number
            sent.release()
        assert await client.rest() == b"0\r\n\r\n"
        await client.close()


async def test_a_client_that_takes_nothing_stops_the_upstream() -> None:
    async def flood(connection: Connection) -> None:
        if b"/view" not in (await connection.head())[0]:
            return
        await connection.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1000):
            written.append(len(written))
            await connection.write(b"x" * MIB)

    written: list[int] = []
    async with RawUpstream(flood) as raw, proxy(comfy_url=raw.url) as bound:
        client = await connect(bound.comfy_url)
        client.writer.transport.pause_reading()
        await client.write(b"GET /view HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        before = -1
        async with asyncio.timeout(10):
            while before != len(written) or not written:
                before = len(written)
                for _ in range(200):
                    await asyncio.sleep(0.001)
        stopped = len(written)
        client.writer.transport.resume_reading()
        async with asyncio.timeout(10):
            while len(written) < stopped + 20:
                await client.reader.read(MIB)
        await client.close()

    assert stopped < 100


async def test_an_upload_larger_than_any_buffer_arrives_whole() -> None:
    size = 0

    async def upstream(connection: Connection) -> None:
        nonlocal size
        head = await connection.head()
        if b"POST" in head[0]:
            while size < 64 * MIB:
                size += len(await connection.reader.read(MIB))
        await connection.write(OK)

    async with RawUpstream(upstream) as raw, proxy(comfy_url=raw.url) as bound:
        client = await connect(bound.comfy_url)
        length = b"Content-Length: %d\r\n" % (64 * MIB)
        await client.write(
            b"POST /upload/image HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + length + b"\r\n"
        )
        for _ in range(64):
            await client.write(b"x" * MIB)
        assert (await client.rest()).startswith(b"HTTP/1.1 200 ")
        await client.close()

    assert size == 64 * MIB


async def test_an_early_refusal_of_an_upload_reaches_the_client() -> None:
    async def upstream(connection: Connection) -> None:
        await connection.head()
        await connection.write(b"HTTP/1.1 413 Large\r\nContent-Length: 2\r\n\r\nno")
        await connection.rest()

    async with RawUpstream(upstream) as raw, proxy(comfy_url=raw.url) as bound:
        client = await connect(bound.comfy_url)
        await client.write(
            b"POST /upload/image HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nxxxx"
        )
        head = await client.head()
        assert await client.read(2) == b"no"
        await client.close()

    assert head[0].startswith(b"HTTP/1.1 413")


async def test_a_tunnel_is_refused() -> None:
    heads: list[list[bytes]] = []
    async with RawUpstream(answering(OK, heads)) as raw, proxy(comfy_url=raw.url) as bound:
        answer = await exchange(
            bound.comfy_url,
            b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n"
            b"Connection: close\r\n\r\n",
        )

    assert not answer.startswith(b"HTTP/1.1 2")
    assert not [head for head in heads if b"CONNECT" in head[0]]


async def test_only_a_trusted_proxy_is_believed_about_where_a_request_came_from() -> None:
    heads: list[list[bytes]] = []
    for trusted, chain in (("127.0.0.0/8", b"1.1.1.1, 127.0.0.1"), ("10.0.0.0/8", b"127.0.0.1")):
        networks = (ipaddress.ip_network(trusted),)
        async with (
            RawUpstream(answering(OK, heads)) as raw,
            proxy(comfy_url=raw.url, trusted_proxies=networks) as bound,
        ):
            heads.clear()
            await exchange(
                bound.comfy_url,
                b"GET /view HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 1.1.1.1\r\n"
                b"Connection: close\r\n\r\n",
            )
            seen = next(head for head in heads if b"/view" in head[0])
            assert b"x-forwarded-for: " + chain in seen


@pytest.mark.parametrize("path", [b"/upload/image", b"/prompt"])
async def test_a_body_whose_chunks_make_no_sense_is_a_400(path: bytes) -> None:
    async def patient(connection: Connection) -> None:
        await connection.head()
        await connection.rest()

    async with RawUpstream(patient) as raw, proxy(comfy_url=raw.url) as bound:
        answer = await exchange(
            bound.comfy_url,
            b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            b"Connection: close\r\n\r\nZZ\r\nxx\r\n0\r\n\r\n",
        )

    assert answer.startswith(b"HTTP/1.1 400 ")
