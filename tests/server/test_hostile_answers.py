"""Upstreams that answer with bytes that no server should send: nothing of it reaches a client."""

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest

from tests.server.inloop import Connection, RawUpstream, connect, exchange, proxy
from tests.server.requests import get, json_of, post, waiting
from tests.server.wire import read_answers

pytestmark = [pytest.mark.usefixtures("gpu_dir", "gpu_key"), pytest.mark.timeout(120)]

OK = b"HTTP/1.1 200 OK\r\n"
TWO = b"Content-Length: 2\r\n\r\nok"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"

# What the upstream says: what the client gets, `|` between what is as good, `*` for any answer
# that is in order.
STATUS = {
    b"HTTP/1.1 0 X\r\n" + TWO: "502",
    b"HTTP/1.1 000 X\r\n" + TWO: "502",
    b"HTTP/1.1 99 X\r\n" + TWO: "502",
    b"HTTP/1.1 099 X\r\n" + TWO: "502",
    b"HTTP/1.1 600 X\r\n" + TWO: "502",
    b"HTTP/1.1 999 X\r\n" + TWO: "502",
    b"HTTP/1.1 1000 X\r\n" + TWO: "502",
    b"HTTP/1.1 -200 X\r\n" + TWO: "502",
    b"HTTP/1.1 2OO X\r\n" + TWO: "502",
    b"HTTP/1.1 0x200 X\r\n" + TWO: "502",
    b"HTTP/1.1 20\r\n" + TWO: "502",
    b"HTTP/1.1\r\n" + TWO: "502",
    b"HTTP/1.1 200\r\n" + TWO: "200 ok",
    b"HTTP/1.1 200 \r\n" + TWO: "200 ok",
    b"HTTP/1.1 200 \xff\xe9\r\n" + TWO: "200 ok",
    b"HTTP/1.0 200 OK\r\n" + TWO: "200 ok",
    b"HTTP/1.1 299 Odd\r\n" + TWO: "299 ok",
    b"HTTP/1.1 599 Odd\r\n" + TWO: "599 ok",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nok": "502",
    b"HTTP/1.1 100 Continue\r\n\r\n": "502",
}
NO_HTTP = {
    b"": "502",
    b"\r\n": "502",
    b"\r\n\r\n": "502",
    b"<html>this was HTTP/0.9</html>": "502",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": "502",
    b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + b"\x00" * 18: "502",
    b"\x15\x03\x01\x00\x02\x02\x46": "502",
    b"SSH-2.0-OpenSSH_9.6\r\n": "502",
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n": "502",
    b"ICY 200 OK\r\n" + TWO: "502",
    b"HTTP/9.9 200 OK\r\n" + TWO: "*",
    b"HTTP/1.1 200 OK": "502",
    OK: "502",
    OK + b"Content-Length: 2": "502",
}
HEADERS = {
    OK + b"X: a\0b\r\n" + TWO: "502",
    OK + b"X: a\rY: b\r\n" + TWO: "502",
    OK + b"X: a\x1bb\r\n" + TWO: "502",
    OK + b"X\0: a\r\n" + TWO: "502",
    OK + b": a\r\n" + TWO: "502",
    OK + b"no colon\r\n" + TWO: "502",
    OK + b"X Y: a\r\n" + TWO: "502",
    OK + b"X(Y): a\r\n" + TWO: "502",
    OK + b"X\xff: a\r\n" + TWO: "502",
    OK + b"X: \xff\xe9\ttab\r\n" + TWO: "200 ok",
    OK + b"X:\r\n" + TWO: "200 ok",
    OK + b"X: a\r\n  folded\r\n" + TWO: "200 ok|502",
    OK + b" X: a\r\n" + TWO: "200 ok|502",
    OK + b"X : a\r\n" + TWO: "502",
    OK + b"X: a\nY: b\r\n" + TWO: "200 ok|502",
    OK.replace(b"\r", b"") + TWO.replace(b"\r", b""): "200 ok|502",
    OK + b"X: 1\r\nX: 2\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n" + TWO: "200 ok",
    OK + b"X: " + b"a" * 2**20 * 8 + b"\r\n" + TWO: "502",
    OK + b"X" * 2**20 + b": a\r\n" + TWO: "502",
    OK + b"".join(b"X-%d: a\r\n" % number for number in range(500)) + TWO: "200 ok",
    OK + b"X: a\r\n" * 100_000 + TWO: "502",
}
FRAMING = {
    OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok!": "502",
    OK + b"Content-Length: 2, 3\r\n\r\nok!": "502",
    OK + b"Content-Length: +2\r\n\r\nok": "502",
    OK + b"Content-Length: -2\r\n\r\nok": "502",
    OK + b"Content-Length: 0x2\r\n\r\nok": "502",
    OK + b"Content-Length: 2 2\r\n\r\nok": "502",
    OK + b"Content-Length: 2a\r\n\r\nok": "502",
    OK + b"Content-Length: 18446744073709551618\r\n\r\nok": "502",
    OK + b"Content-Length : 2\r\n\r\nok": "502",
    OK + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nok": "200 ok|502",
    OK + b"Content-Length: 2, 2\r\n\r\nok": "200 ok|502",
    OK + b"Content-Length:\r\n\r\nok": "502",
    OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n" + END: "200 ok|502",
    OK + b"Transfer-Encoding: \0chunked\r\n\r\n2\r\nok\r\n" + END: "502",
    OK + b"Transfer-Encoding:\x0bchunked\r\n\r\n2\r\nok\r\n" + END: "502",
    OK + b"Content-Length: 9\r\n\r\nok": "broken 200 ok",
    OK + b"Content-Length: 3\r\nConnection: content-length\r\n\r\nok": "broken 200 ok",
    OK + b"Transfer-Encoding: xchunked\r\n\r\nok": "502",
    OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: xchunked\r\n\r\nok": "502",
    OK + b"\r\nok": "200 ok",
    CHUNKED + b"2\r\nok\r\n" + END: "200 ok",
    CHUNKED + b"2;ext=1\r\nok\r\n" + END: "200 ok",
    CHUNKED + b"2\r\nok\r\n0\r\nTrailer: x\r\n\r\n": "200 ok",
    CHUNKED + b"2\r\nok\r\n": "broken 200 ok",
    CHUNKED + b"2\r\nok\r\n0\r\n": "broken 200 ok",
    CHUNKED + b"3\r\nok": "broken 200 ok",
}
# Bodies whose chunks make no sense: whatever came before, the answer must not end in order.
CHUNKS = (b"G\r\n", b"-1\r\nx\r\n", b"0x1\r\nx\r\n", b"F" * 17 + b"\r\nx", b"1\r\nxyz\r\n", b"\r\n")

Answers = dict[bytes, str]
ANSWERS = {"status": STATUS, "no http": NO_HTTP, "headers": HEADERS, "framing": FRAMING}


# What both engines say of themselves when nothing runs.
IDLE = b'{"models":[],"queue_running":[],"queue_pending":[]}'


class Script:
    """Answers `?n` with the n-th of some answers, and closes; everything else as an engine does."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = answers

    async def __call__(self, connection: Connection) -> None:
        head = await connection.head()
        _, _, number = head[0].split(b" ")[1].partition(b"?")
        if number.isdigit():
            await connection.write(self._answers[int(number)])
        elif b"/api/jobs" in head[0]:
            await connection.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            await connection.write(OK + b"Content-Length: %d\r\n\r\n" % len(IDLE) + IDLE)


def told(data: bytes, method: str = "GET") -> str:
    """Give in a word what a client got."""
    if not data:
        return "nothing"
    (answer,) = read_answers(data, (method,))
    if answer.status == 502:
        assert method == "HEAD" or json_of(data)["reason"] == "upstream"
        return "502"
    text = f"{answer.status} {answer.body[:20].decode('latin-1')}"
    return text if answer.whole else f"broken {text}"


async def differing(answers: Answers, path: str) -> dict[bytes, str]:
    """Give the answers that a client did not get as it should, and what it got instead."""
    wrong: dict[bytes, str] = {}
    script = Script(list(answers))
    async with RawUpstream(script) as raw, proxy(raw.url, raw.url) as bound:
        listener = bound.comfy_url if path == "/prompt" else bound.ollama_url
        request = get if path in PASSING else post
        for number, (answer, wanted) in enumerate(answers.items()):
            wished = wanted if path not in READ_WHOLE else re.sub("broken [^|]*", "502", wanted)
            async with asyncio.timeout(10):
                got = told(await exchange(listener, request(f"{path}?{number}")))
            if wished != "*" and got not in wished.split("|"):
                wrong[answer[:90]] = f"{got}, not {wished}"
        await waiting(bound.ollama_url, state="idle", llm_inflight=0)
    return wrong


PASSING = ("/x", "/props")
# Their answers are looked into before they go on.
READ_WHOLE = ("/props", "/prompt")


@pytest.mark.parametrize("path", [*PASSING, "/api/chat", "/prompt"])
@pytest.mark.parametrize("kind", list(ANSWERS))
async def test_a_hostile_answer_is_a_502_or_is_seen_to_be_broken(kind: str, path: str) -> None:
    assert await differing(ANSWERS[kind], path) == {}


async def test_chunks_that_make_no_sense_never_end_in_order() -> None:
    answers = [CHUNKED + b"2\r\nok\r\n" + bad + END for bad in CHUNKS]
    answers += [CHUNKED + bad + END for bad in CHUNKS]
    async with RawUpstream(Script(answers)) as raw, proxy(raw.url) as bound:
        for number, answer in enumerate(answers):
            got = told(await exchange(bound.ollama_url, get(f"/x?{number}")))
            assert got == "502" or got.startswith("broken"), (answer, got)


class Play:
    """Plays one answer to `/x`, whatever it is, and notes how much of it was taken."""

    def __init__(self, play: Callable[[Connection], Awaitable[None]]) -> None:
        self._play = play
        self.ended = asyncio.Event()

    async def __call__(self, connection: Connection) -> None:
        while True:
            head = await connection.head()
            if b" /x" in head[0]:
                try:
                    await self._play(connection)
                finally:
                    self.ended.set()
            else:
                await connection.write(OK + TWO)


@pytest.mark.parametrize("early", [b"100 Continue", b"102 Processing", b"103 Early Hints"])
async def test_a_thousand_interim_answers_are_not_the_answer(early: bytes) -> None:
    async def play(connection: Connection) -> None:
        await connection.write(b"HTTP/1.1 %s\r\nLink: </a>\r\n\r\n" % early * 1000 + OK + TWO)

    async with RawUpstream(Play(play)) as raw, proxy(raw.url) as bound:
        assert told(await exchange(bound.ollama_url, get("/x"))) == "200 ok"


@pytest.mark.parametrize("piece", [b"HTTP/1.1 100 Continue\r\n\r\n" * 1000], ids=["interim"])
async def test_a_client_can_leave_an_upstream_that_never_comes_to_the_point(piece: bytes) -> None:
    async def play(connection: Connection) -> None:
        while True:
            await connection.write(piece)
            await asyncio.sleep(0)

    flood = Play(play)
    async with RawUpstream(flood) as raw, proxy(raw.url) as bound:
        client = await connect(bound.ollama_url)
        await client.write(get("/x"))
        await waiting(bound.ollama_url, state="idle")
        await client.close()
        async with asyncio.timeout(10):
            await flood.ended.wait()


@pytest.mark.parametrize(
    "piece", [b"x" * 65_536, b"X-A: b\r\n" * 8192], ids=["one line", "many lines"]
)
async def test_a_head_without_an_end_is_given_up(piece: bytes) -> None:
    async def play(connection: Connection) -> None:
        await connection.write(OK)
        while True:
            await connection.write(piece)

    flood = Play(play)
    async with RawUpstream(flood) as raw, proxy(raw.url) as bound:
        assert told(await exchange(bound.ollama_url, get("/x"))) == "502"
        async with asyncio.timeout(10):
            await flood.ended.wait()


POISON = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison"


@pytest.mark.parametrize(
    ("method", "answer", "wanted"),
    [
        ("GET", OK + TWO + POISON, "200 ok"),
        ("GET", OK + TWO + b"\r\n" + POISON, "200 ok"),
        ("GET", OK + TWO + b"x", "200 ok"),
        ("GET", CHUNKED + b"2\r\nok\r\n" + END + POISON, "200 ok"),
        ("GET", b"HTTP/1.1 204 No\r\n\r\n" + POISON, "204 "),
        ("GET", b"HTTP/1.1 304 No\r\nContent-Length: 99\r\n\r\n" + POISON, "304 "),
        ("HEAD", OK + b"Content-Length: 79\r\n\r\n" + POISON, "200 "),
        ("HEAD", OK + b"Transfer-Encoding: chunked\r\n\r\n" + POISON, "200 "),
        ("PUT", OK + TWO + POISON, "200 ok"),
    ],
)
async def test_bytes_after_an_answer_poison_no_other_request(
    method: str, answer: bytes, wanted: str
) -> None:
    async def play(connection: Connection) -> None:
        await connection.write(answer)

    async with RawUpstream(Play(play)) as raw, proxy(raw.url) as bound:
        for _ in range(3):
            got = told(await exchange(bound.ollama_url, get("/x", method=method)), method)
            assert got in {wanted, "502"}
            assert told(await exchange(bound.ollama_url, get("/y"))) == "200 ok"


async def test_bytes_on_an_idle_connection_are_no_answer() -> None:
    idle: list[Connection] = []

    async def play(connection: Connection) -> None:
        await connection.write(OK + TWO)
        idle.append(connection)

    async with RawUpstream(Play(play)) as raw, proxy(raw.url) as bound:
        assert told(await exchange(bound.ollama_url, get("/x"))) == "200 ok"
        await idle[0].write(POISON)
        for _ in range(3):
            assert told(await exchange(bound.ollama_url, get("/y"))) == "200 ok"


async def test_a_question_about_the_whole_server_reaches_it() -> None:
    lines: list[bytes] = []

    async def upstream(connection: Connection) -> None:
        lines.append((await connection.head())[0])
        await connection.write(OK + TWO)

    async with RawUpstream(upstream) as raw, proxy(raw.url) as bound:
        assert told(await exchange(bound.ollama_url, get("*", method="OPTIONS"))) == "200 ok"

    assert b"OPTIONS * HTTP/1.1" in lines
