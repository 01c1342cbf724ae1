"""Signs of life to a stream that waits, as they are on the wire."""

import asyncio
import json

import pytest

from ocgpu.server.relay.asgi import Message
from ocgpu.server.relay.http import StalledClientError
from ocgpu.server.wait_stream import MESSAGES, NDJSON, SSE, Form, WaitStream, form_of
from tests.server.held import Held, chunk, held, request
from tests.server.inloop import Connection, RawUpstream, exchange, proxy
from tests.server.instant import run_instantly, settle
from tests.server.requests import CHAT, Engine, json_of, status_of, waiting

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

INTERVAL = 0.02
STREAMED = b'{"stream":true}'
END = b"0\r\n\r\n"
NDJSON_STREAM = (
    b"HTTP/1.1 200 OK\r\nX-Engine: here\r\nContent-Type: application/x-ndjson\r\n"
    b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
)
SSE_STREAM = NDJSON_STREAM.replace(b"application/x-ndjson", b"text/event-stream; charset=utf-8")


@pytest.mark.parametrize(
    ("path", "body", "form"),
    [
        ("/api/chat", b"{}", NDJSON),
        ("/api/generate", b'{"stream":null}', NDJSON),
        ("/api/chat", b'{"stream": true }', NDJSON),
        ("/api/chat", b'{"stream":false}', None),
        ("/api/chat", b'{"Stream":false}', None),
        ("/api/chat", b'{"stream":true,"STREAM":false}', None),
        ("/api/chat", b'{"stream":"yes"}', None),
        ("/api/chat", b"[]", None),
        ("/api/chat", b"", None),
        ("/api/chat", b"\xff", None),
        ("/api/chat", b'{"a":' + b"[" * 100_000, None),
        ("/api/embed", b'{"stream":true}', None),
        ("/api/unheard-of", b'{"stream":true}', None),
        ("/v1/chat/completions", b"{}", None),
        ("/v1/chat/completions", b'{"stream":null}', None),
        ("/v1/chat/completions", b'{"stream":true}', SSE),
        ("/v1/completions", b'{"stream":true}', SSE),
        ("/v1/responses", b'{"stream":true}', SSE),
        ("/v1/messages", b'{"stream":true}', MESSAGES),
        ("/v1/embeddings", b'{"stream":true}', None),
    ],
)
def test_a_stream_is_what_the_endpoint_takes_for_one(
    path: str, body: bytes, form: Form | None
) -> None:
    assert form_of(path, [], body) is form


def test_a_page_of_another_site_waits_for_the_engines_own_head() -> None:
    assert form_of("/api/chat", [(b"origin", b"https://elsewhere.example")], b"{}") is None


async def opened(card: Held, path: str, body: bytes, signs: int, sign: bytes) -> Connection:
    """Send a request that has to wait; read its head and so many signs of life."""
    client = await card.open(request(path, body, b"Accept-Encoding: gzip"))
    head = await client.head()
    media = b"application/x-ndjson" if path.startswith("/api/") else b"text/event-stream"
    assert head[0] == b"HTTP/1.1 200 OK"
    assert {b"content-type: " + media, b"x-accel-buffering: no"} <= set(head)
    for _ in range(signs):
        assert await client.read(len(chunk(sign))) == chunk(sign)
    return client


async def rest_of(client: Connection, sign: bytes) -> bytes:
    """What comes yet, without further signs of life."""
    rest = await client.rest()
    await client.close()
    while rest.startswith(chunk(sign)):
        rest = rest.removeprefix(chunk(sign))
    return rest


@pytest.mark.parametrize(
    ("path", "sign", "stream", "piece"),
    [
        ("/api/chat", b" ", NDJSON_STREAM, b'{"done":true}\n'),
        ("/v1/chat/completions", b": waiting\n\n", SSE_STREAM, b"data: [DONE]\n\n"),
        ("/v1/messages", b": waiting\n\n", SSE_STREAM, b"event: message_stop\ndata: {}\n\n"),
    ],
)
async def test_a_stream_that_waits_has_its_head_at_once_and_signs_of_life_until_its_body(
    path: str, sign: bytes, stream: bytes, piece: bytes
) -> None:
    async with held(stream + chunk(piece) + END, wait_keepalive=INTERVAL) as card:
        client = await opened(card, path, STREAMED, 3, sign)
        assert card.heads == []

        card.let_go.set()
        rest = await rest_of(client, sign)

        assert rest == chunk(piece) + END
        assert not [line for line in card.heads[0] if b"accept-encoding" in line.lower()]


async def test_without_the_setting_nothing_comes_before_the_engine_answers() -> None:
    async with held(NDJSON_STREAM + chunk(b"{}\n") + END) as card:
        client = await card.open(request("/api/chat"))
        await waiting(card.url, waiting={"llm": 1, "image": 0, "bytes": 4})

        card.let_go.set()

        assert b"x-engine: here" in await client.head()
        # What came in one piece with its end is passed on in one piece, by its length.
        assert await client.rest() in (b"{}\n", chunk(b"{}\n") + END)
        await client.close()


@pytest.mark.parametrize("body", [b'{"stream":false}', b'{"stream":"odd"}'])
async def test_what_is_no_stream_keeps_the_engines_own_answer(body: bytes) -> None:
    answer = b"HTTP/1.1 404 No\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    async with held(answer, wait_keepalive=0.001) as card:
        client = await card.open(request("/api/chat", body))
        await waiting(card.url, waiting={"llm": 1, "image": 0, "bytes": 2 + len(body)})

        card.let_go.set()

        assert (await client.head())[0] == b"HTTP/1.1 404 Not Found"
        await client.close()


async def test_a_stream_that_need_not_wait_is_the_engines_alone() -> None:
    engine = Engine()
    async with RawUpstream(engine) as raw, proxy(raw.url, wait_keepalive=0.001) as bound:
        chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT))
        await waiting(bound.ollama_url, llm_inflight=1)
        engine.go_on.set()
        answer = await chat

    assert b"content-length: 4" in answer
    assert answer.endswith(b"\r\n\r\nchat")


async def test_a_refusal_at_once_is_a_503_still() -> None:
    async with held(wait_keepalive=INTERVAL, max_queue=1, llm_wait_timeout=10.0) as card:
        client = await opened(card, "/api/chat", b"{}", 1, b" ")

        answer = await exchange(card.url, CHAT)

        assert status_of(answer) == 503
        assert json_of(answer)["reason"] == "queue_full"
        await client.close()
        await waiting(card.url, waiting={"llm": 0, "image": 0, "bytes": 2})


REFUSED = "the gpu was not free within 0.1s"


@pytest.mark.parametrize(
    ("path", "sign", "event"),
    [
        ("/api/chat", b" ", b'{"error":"%s"}\n'),
        (
            "/v1/chat/completions",
            b": waiting\n\n",
            b'data: {"error":{"message":"%s","type":"timeout","code":503}}\n\n',
        ),
        (
            "/v1/messages",
            b": waiting\n\n",
            b"event: error\ndata: "
            b'{"type":"error","error":{"message":"%s","type":"timeout","code":503}}\n\n',
        ),
    ],
)
async def test_a_refusal_after_the_head_is_an_error_in_the_streams_own_form(
    path: str, sign: bytes, event: bytes
) -> None:
    async with held(wait_keepalive=INTERVAL, llm_wait_timeout=0.1) as card:
        client = await opened(card, path, STREAMED, 1, sign)

        rest = await rest_of(client, sign)

        assert rest == chunk(event % REFUSED.encode()) + END
        assert card.heads == []


def whole(status: bytes, body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 " + status, b"Connection: close", b"Content-Length: %d" % len(body)]
    return b"\r\n".join([*lines, *headers]) + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/api/chat", whole(b"404 No", b'{"error":"model not found"}'), "model not found"),
        ("/api/chat", whole(b"500 No", b'{"error":{"message":"boom"}}'), "boom"),
        ("/v1/chat/completions", whole(b"404 No", b'{"error":{"message":"no"}}'), "no"),
        ("/v1/chat/completions", whole(b"400 No", b'{"error":"bad"}'), "bad"),
        (
            "/api/chat",
            whole(b"502 No", b"<html>\xff" + b"x" * 70_000),
            "the engine gave no stream but an answer 502: <html>\ufffd" + "x" * 193,
        ),
        (
            "/v1/chat/completions",
            whole(b"200 OK", b'{"choices":[]}', b"Content-Type: application/json"),
            'the engine gave no stream but an answer 200: {"choices":[]}',
        ),
        (
            "/api/chat",
            whole(b"200 OK", b"packed", b"Content-Encoding: gzip"),
            "the engine gave no stream but an answer 200: packed",
        ),
    ],
)
async def test_an_answer_that_is_no_stream_is_an_error_in_the_streams_own_form(
    path: str, answer: bytes, message: str
) -> None:
    sign = b" " if path.startswith("/api/") else b": waiting\n\n"
    async with held(answer, wait_keepalive=INTERVAL) as card:
        client = await opened(card, path, STREAMED, 1, sign)
        card.let_go.set()

        rest = await rest_of(client, sign)

    assert rest.endswith(END)
    document = rest.partition(b"\r\n")[2].partition(b"\n")[0].removeprefix(b"data: ")
    error = json.loads(document)["error"]
    assert (error if path.startswith("/api/") else error["message"]) == message


async def test_an_engine_that_says_nothing_is_an_error_in_the_streams_own_form() -> None:
    async with held(b"", wait_keepalive=INTERVAL) as card:
        client = await opened(card, "/api/chat", b"{}", 1, b" ")
        card.let_go.set()

        rest = await rest_of(client, b" ")

    assert "no answer from" in json.loads(rest.split(b"\r\n")[1])["error"]
    assert rest.endswith(END)


async def test_an_engine_that_breaks_off_leaves_the_stream_without_its_end() -> None:
    async with held(NDJSON_STREAM + chunk(b'{"a":1}\n'), wait_keepalive=INTERVAL) as card:
        client = await opened(card, "/api/chat", b"{}", 1, b" ")
        card.cut.clear()
        card.let_go.set()
        async with asyncio.timeout(10):
            await client.reader.readuntil(chunk(b'{"a":1}\n'))

        card.cut.set()

        assert await client.rest() == b""
        await client.close()


async def test_a_client_that_leaves_after_the_head_is_removed_and_never_sent_on() -> None:
    async with held(wait_keepalive=INTERVAL) as card:
        client = await opened(card, "/api/chat", b"{}", 1, b" ")
        assert len(tasks_of_signs()) == 1

        await client.close()

        await waiting(card.url, waiting={"llm": 0, "image": 0, "bytes": 2})
        assert card.heads == []
        assert tasks_of_signs() == []


def tasks_of_signs() -> list[asyncio.Task]:
    """Tasks that show signs of life to somebody."""
    name = WaitStream._show_signs.__qualname__
    return [t for t in asyncio.all_tasks() if t.get_coro().__qualname__ == name]


async def test_a_shutdown_after_the_head_is_an_error_in_the_streams_own_form() -> None:
    async with held(wait_keepalive=INTERVAL, drain_timeout=5.0) as card:
        client = await opened(card, "/api/chat", b"{}", 1, b" ")
        rest = asyncio.ensure_future(rest_of(client, b" "))
        rest.add_done_callback(lambda _: card.let_go.set())
        card.drains = True

    assert await rest == chunk(b'{"error":"the proxy is shutting down"}\n') + END


def test_a_client_that_takes_not_even_signs_of_life_is_given_up() -> None:
    taken: list[Message] = []

    async def send(message: Message) -> None:
        taken.append(message)
        if message.get("body") == b" ":
            await asyncio.Event().wait()

    async def play() -> None:
        stream = WaitStream(send, NDJSON, 1.0, stall_timeout=60.0)
        stream.start()
        await asyncio.sleep(1.0)
        await settle()

        with pytest.raises(StalledClientError):
            await stream.send({"type": "http.response.start", "status": 200, "headers": []})

        assert asyncio.get_running_loop().time() == 61.0
        assert [message["type"] for message in taken] == [
            "http.response.start",
            "http.response.body",
            "http.response.body",
        ]

    run_instantly(play)
