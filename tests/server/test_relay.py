"""The byte path through a real listener, against upstreams that speak raw bytes."""

import asyncio
import json

import pytest

from tests.server.inloop import Connection, RawUpstream, connect, exchange, proxy

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

CHAT = b"POST /api/chat HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def test_the_request_reaches_the_upstream_byte_for_byte() -> None:
    seen: list[list[bytes]] = []

    async def upstream(connection: Connection) -> None:
        seen.append(await connection.head())
        await connection.write(OK)

    async with RawUpstream(upstream) as raw, proxy(raw.url) as bound:
        seen.clear()
        answer = await exchange(
            bound.ollama_url,
            b"GET /a%2Fb//c/../d?x=%20&y=a+b HTTP/1.1\r\nHost: gpu.example\r\n"
            b"X-Twice: 1\r\nX-Twice: 2\r\nConnection: close\r\n\r\n",
        )

    head = next(h for h in seen if b"/a%2Fb" in h[0])
    assert head[0] == b"GET /a%2Fb//c/../d?x=%20&y=a+b HTTP/1.1"
    assert [line for line in head if line.lower().startswith(b"x-twice")] == [
        b"x-twice: 1",
        b"x-twice: 2",
    ]
    assert not [line for line in head if line.lower().startswith((b"accept", b"user-agent"))]
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\nok")


async def test_the_first_chunk_arrives_before_the_last_is_sent() -> None:
    go_on = asyncio.Event()

    async def upstream(connection: Connection) -> None:
        await connection.head()
        await connection.write(STREAM + chunk(b"first\n"))
        await go_on.wait()
        await connection.write(chunk(b"last\n") + b"0\r\n\r\n")

    async with RawUpstream(upstream) as raw, proxy(comfy_url=raw.url) as bound:
        client = await connect(bound.comfy_url)
        await client.write(b"GET /view HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head = await client.head()
        first = await client.read(len(chunk(b"first\n")))
        go_on.set()
        rest = await client.rest()
        await client.close()

    assert b"x-accel-buffering: no" in head
    assert first == chunk(b"first\n")
    assert rest == chunk(b"last\n") + b"0\r\n\r\n"


async def test_the_head_arrives_before_any_body() -> None:
    go_on = asyncio.Event()

    async def upstream(connection: Connection) -> None:
        await connection.head()
        await connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
        await go_on.wait()
        await connection.write(b"ok")

    async with RawUpstream(upstream) as raw, proxy(comfy_url=raw.url) as bound:
        client = await connect(bound.comfy_url)
        await client.write(b"GET /view HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await client.head())[0] == b"HTTP/1.1 200 OK"
        go_on.set()
        assert await client.rest() == b"ok"
        await client.close()


async def test_an_upload_streams_to_the_upstream() -> None:
    arrived = asyncio.Event()

    async def upstream(connection: Connection) -> None:
        head = await connection.head()
        if b"PUT" in head[0]:
            assert await connection.read(len(chunk(b"first"))) == chunk(b"first")
            arrived.set()
            assert await connection.read(len(chunk(b"last")) + 5) == chunk(b"last") + b"0\r\n\r\n"
        await connection.write(OK)

    async with RawUpstream(upstream) as raw, proxy(comfy_url=raw.url) as bound:
        client = await connect(bound.comfy_url)
        await client.write(
            b"PUT /userdata/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"first")
        )
        async with asyncio.timeout(10):
            await arrived.wait()
        await client.write(chunk(b"last") + b"0\r\n\r\n")
        assert (await client.rest()).endswith(b"\r\n\r\nok")
        await client.close()


@pytest.mark.parametrize("framing", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
async def test_an_upstream_that_breaks_off_is_a_broken_response(framing: bytes) -> None:
    async def upstream(connection: Connection) -> None:
        await connection.head()
        body = chunk(b"part") if b"chunked" in framing else b"part"
        await connection.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n" + body)

    async with RawUpstream(upstream) as raw, proxy(comfy_url=raw.url) as bound:
        answer = await exchange(bound.comfy_url, b"GET /view HTTP/1.1\r\nHost: x\r\n\r\n")

    assert b"part" in answer
    assert not answer.endswith(b"0\r\n\r\n")


async def test_a_client_that_leaves_mid_stream_ends_the_upstreams_request() -> None:
    closed = asyncio.Event()

    async def upstream(connection: Connection) -> None:
        head = await connection.head()
        if b"/api/chat" not in head[0]:
            await connection.write(OK)
            return
        await connection.read(2)
        await connection.write(STREAM + chunk(b"first\n"))
        await connection.rest()
        closed.set()

    async with RawUpstream(upstream) as raw, proxy(raw.url) as bound:
        client = await connect(bound.ollama_url)
        await client.write(b"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        await client.head()
        assert await health(bound.ollama_url, "llm_inflight") == 1

        await client.close()
        async with asyncio.timeout(10):
            await closed.wait()

        assert await health(bound.ollama_url, "state") == "idle"


async def test_a_client_that_takes_no_byte_is_given_up() -> None:
    closed = asyncio.Event()

    async def upstream(connection: Connection) -> None:
        head = await connection.head()
        if b"/api/chat" not in head[0]:
            await connection.write(OK)
            return
        try:
            await connection.write(STREAM)
            while True:
                await connection.write(chunk(b"x" * 65536))
        finally:
            closed.set()

    async with RawUpstream(upstream) as raw, proxy(raw.url, stall_timeout=0.2) as bound:
        client = await connect(bound.ollama_url)
        client.writer.transport.pause_reading()
        await client.write(b"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")

        async with asyncio.timeout(10):
            await closed.wait()

        await until_state(bound.ollama_url, "idle")
        await client.close()


async def test_an_upstream_that_refuses_is_a_502_at_once() -> None:
    async with RawUpstream(lambda _connection: asyncio.sleep(0)) as gone:
        url = gone.url
    async with proxy(url, url) as bound:
        for listener in (bound.ollama_url, bound.comfy_url):
            answer = await exchange(
                listener, b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            )
            assert answer.startswith(b"HTTP/1.1 502 ")
            assert b'"reason":"upstream"' in answer
        answer = await exchange(
            bound.ollama_url,
            CHAT,
        )
        assert answer.startswith(b"HTTP/1.1 502 ")
        assert await health(bound.ollama_url, "state") == "idle"


@pytest.mark.parametrize("status", [b"099 Odd", b"999 Odd", b"600 Odd"])
async def test_a_status_that_would_end_our_process_is_a_502(status: bytes) -> None:
    async def upstream(connection: Connection) -> None:
        await connection.head()
        await connection.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")

    async with RawUpstream(upstream) as raw, proxy(comfy_url=raw.url) as bound:
        answer = await exchange(
            bound.comfy_url, b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )

    assert answer.startswith(b"HTTP/1.1 502 ")


async def test_a_locked_post_gets_a_connection_of_its_own_and_is_never_sent_twice() -> None:
    posts: list[bytes] = []

    async def upstream(connection: Connection) -> None:
        while True:
            head = await connection.head()
            if b"POST" in head[0]:
                posts.append(head[0])
                return
            await connection.write(OK)

    async with RawUpstream(upstream) as raw, proxy(raw.url) as bound:
        get = b"GET /api/tags HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        await exchange(bound.ollama_url, get)
        before = raw.connections
        await exchange(bound.ollama_url, get)
        assert raw.connections == before, "a GET is sent on a kept connection"

        answer = await exchange(
            bound.ollama_url,
            CHAT,
        )

        assert raw.connections == before + 1
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert len(posts) == 1


@pytest.mark.parametrize("method", [b"post", b"Post"])
async def test_a_method_in_another_case_takes_the_lock_and_passes_as_it_is(method: bytes) -> None:
    heads: list[bytes] = []
    go_on = asyncio.Event()

    async def upstream(connection: Connection) -> None:
        heads.append((await connection.head())[0])
        if b"/api/chat" in heads[-1]:
            await go_on.wait()
        await connection.write(OK)

    async with RawUpstream(upstream) as raw, proxy(raw.url) as bound:
        chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT.replace(b"POST", method)))
        await until_state(bound.ollama_url, "llm")
        go_on.set()
        await chat
        await until_state(bound.ollama_url, "idle")

    assert method + b" /api/chat HTTP/1.1" in heads


async def test_a_compressed_answer_passes_as_it_is() -> None:
    async def upstream(connection: Connection) -> None:
        await connection.head()
        await connection.write(
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n"
            b"\x1f\x8b\x00\x00"
        )

    async with RawUpstream(upstream) as raw, proxy(comfy_url=raw.url) as bound:
        answer = await exchange(
            bound.comfy_url, b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )

    assert answer.endswith(b"\r\n\r\n\x1f\x8b\x00\x00")
    assert b"content-encoding: gzip" in answer


async def test_a_redirect_passes_as_it_is() -> None:
    async def upstream(connection: Connection) -> None:
        await connection.head()
        await connection.write(
            b"HTTP/1.1 307 Temporary\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
        )

    async with RawUpstream(upstream) as raw, proxy(comfy_url=raw.url) as bound:
        answer = await exchange(
            bound.comfy_url, b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )

    assert answer.startswith(b"HTTP/1.1 307 ")
    assert b"location: /elsewhere" in answer


async def test_a_transfer_coding_that_would_be_lost_is_refused() -> None:
    async with RawUpstream(lambda _connection: asyncio.sleep(0)) as raw, proxy(raw.url) as bound:
        answer = await exchange(
            bound.ollama_url,
            b"POST /api/show HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        )

    assert answer.startswith(b"HTTP/1.1 501 ")


async def test_head_keeps_the_length_and_has_no_body() -> None:
    async def upstream(connection: Connection) -> None:
        await connection.head()
        await connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n")

    async with RawUpstream(upstream) as raw, proxy(raw.url) as bound:
        answer = await exchange(
            bound.ollama_url, b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )

    assert b"content-length: 17" in answer
    assert answer.endswith(b"\r\n\r\n")


async def test_a_percent_encoded_path_does_not_dodge_the_lock() -> None:
    seen: list[bytes] = []

    async def upstream(connection: Connection) -> None:
        head = await connection.head()
        seen.append(head[0])
        if b"/queue" in head[0]:
            running = [[0, "a", {}, {}, []]]
            body = json.dumps({"queue_running": running, "queue_pending": []}).encode()
            await connection.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
        elif b"rompt" in head[0]:
            await connection.read(2)
            body = b'{"prompt_id":"a"}'
            await connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n" + body)
        else:
            await connection.write(OK)

    async with RawUpstream(upstream) as raw, proxy(comfy_url=raw.url, job_timeout=0.5) as bound:
        await until_state(bound.comfy_url, "image")
        await until_state(bound.comfy_url, "idle")
        await exchange(
            bound.comfy_url,
            CHAT.replace(b"/api/chat", b"/%70rompt"),
        )
        assert await health(bound.comfy_url, "state") == "image"
    assert b"POST /%70rompt HTTP/1.1" in seen


async def health(url: str, key: str) -> object:
    """Give one value of `/healthz`."""
    answer = await exchange(url, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return json.loads(answer.partition(b"\r\n\r\n")[2])[key]


async def until_state(url: str, state: str) -> None:
    """Wait until the lock is in a state."""
    async with asyncio.timeout(10):
        while await health(url, "state") != state:  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # the state is behind HTTP: nothing to await
