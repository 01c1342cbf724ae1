"""Requests that two servers could read differently: the upstream sees one meaning, or nothing."""

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.processes import Processes
from tests.server.client import call
from tests.server.recorder import Recorder
from tests.server.served import COMMAND, Served
from tests.server.wire import read_answers

CHUNKS = b"2\r\nok\r\n0\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"


def ask(*headers: bytes, body: bytes = b"", line: bytes = b"POST /x HTTP/1.1") -> bytes:
    return b"\r\n".join([line, b"Host: x", *headers]) + b"\r\n\r\n" + body


def chunked(value: bytes, body: bytes = CHUNKS, **line: bytes) -> bytes:
    return ask(b"Transfer-Encoding: " + value, body=body, **line)


def length(value: bytes, body: bytes = b"ok") -> bytes:
    return ask(b"Content-Length: " + value, body=body)


# The upstream must not see any of it.
REFUSED = [
    length(b"2\r\nContent-Length: 3", b"ok!"),
    *map(length, (b"2, 2", b"+2", b"-2", b"2 2", b"0x2", b"2a", b"", b"18446744073709551618")),
    *map(length, (b"\r\n 2", b"\x0b2", b"2\0", b"\xb2", b"2;", b'"2"', b"2.0", b"1e1", b"1_0")),
    ask(b"Content-Length : 2", body=b"ok"),
    ask(b"Content-Length\t: 2", body=b"ok"),
    ask(b" Content-Length: 2", body=b"ok"),
    *map(chunked, (b"xchunked", b"identity", b"chunked, identity", b"\x0bchunked", b"chunked\0")),
    *map(chunked, (b'"chunked"', b"", b"chunked,", b"chunked;q=1", b"\r\n chunked", b"chunkedx")),
    *map(chunked, (b"gzip, chunked", b"identity, chunked", b"chunked, chunked", b", chunked")),
    chunked(b"chunked\r\nTransfer-Encoding: identity"),
    chunked(b"identity\r\nTransfer-Encoding: chunked"),
    ask(b"Transfer-Encoding : chunked", body=CHUNKS),
    ask(b" Transfer-Encoding: chunked", body=CHUNKS),
    chunked(b"chunked", line=b"POST /x HTTP/1.0"),
    ask(b"X: a\0b"),
    ask(b"X: a\rY: b"),
    ask(b"X: a\r\n folded"),
    ask(b"X Y: a"),
    ask(b"X\xff: a"),
    ask(b"no colon"),
    ask(b": a"),
    ask(b"Host: y"),
    ask(line=b"GET  /x HTTP/1.1"),
    ask(line=b"GET\t/x\tHTTP/1.1"),
    ask(line=b"GET /x HTTP/1.2"),
    ask(line=b"GET /x HTTP/2.0"),
    ask(line=b"GET /x http/1.1"),
    ask(line=b"GET /x y HTTP/1.1"),
    ask(line=b"GET /x\0y HTTP/1.1"),
    ask(line=b"GET /\xff HTTP/1.1"),
    ask(line=b"G{T /x HTTP/1.1"),
    b"GET /x\r\n\r\n",
    b"GET /x HTTP/1.1\rHost: x\r\r",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x00\x05hello\r\n\r\n",
]
# Legal, or understood in one way only: the upstream sees exactly this body.
ONE_MEANING = {
    length(b"2\r\nContent-Length: 2"): b"ok",
    length(b"  0002  "): b"ok",
    ask(b"Content_Length: 2"): b"",
    ask(b"Content-Length: 33", b"Connection: content-length", body=HIDDEN): HIDDEN,
    ask(b"Content-Length: 2", b"Connection: host, x-forwarded-for", body=b"ok"): b"ok",
    ask(b"Connection: close, Transfer-Encoding", b"Transfer-Encoding: chunked", body=CHUNKS): b"ok",
    chunked(b"CHUNKED"): b"ok",
    chunked(b"chunked", b'2;ext=1;x="y"\r\nok\r\n0;end\r\n\r\n'): b"ok",
    chunked(b"chunked", b"00002\r\nok\r\n000\r\n\r\n"): b"ok",
    chunked(b"chunked", b"2\r\nok\r\n0\r\nHost: y\r\nContent-Length: 9\r\n\r\n"): b"ok",
    ask(b"X: a\nTransfer-Encoding: chunked", body=CHUNKS): b"ok",
    ask(b"Expect: 100-continue", b"Content-Length: 2", body=b"ok"): b"ok",
    ask(b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAM"): b"",
    ask(line=b"POST /x%0d%0aHost:%20y HTTP/1.1"): b"",
    b"\r\n\r\n" + ask(): b"",
    b"POST /x HTTP/1.1\nHost: x\n\n": b"",
}
# Not refused by every server: the body ends where the chunks end, and the connection with it.
BOTH = [
    ask(b"Transfer-Encoding: chunked", b"Content-Length: 4", body=CHUNKS + HIDDEN),
    ask(b"Content-Length: 4", b"Transfer-Encoding: chunked", body=CHUNKS + HIDDEN),
    ask(b"Content-Length: 999", b"Transfer-Encoding: chunked", body=CHUNKS + HIDDEN),
]
# Chunks that make no sense: whatever the upstream saw before, it never sees an end.
SENSELESS = [
    b"0x2\r\nok\r\n0\r\n\r\n",
    b"+2\r\nok\r\n0\r\n\r\n",
    b"-2\r\nok\r\n0\r\n\r\n",
    b"2\nok\n0\n\n",
    b"2;a\nok\r\n0\r\n\r\n",
    b"G\r\nok\r\n0\r\n\r\n",
    b"F" * 17 + b"\r\nok\r\n0\r\n\r\n",
    b"2\r\nokXX0\r\n\r\n",
    b"2\r\nok!\r\n0\r\n\r\n",
    b"\r\n2\r\nok\r\n0\r\n\r\n",
    b"2\r\nok\r\n0\r\nX\0: y\r\n\r\n",
]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as started:
        yield started


@pytest.fixture
def served(recorder: Recorder, processes: Processes, tmp_path: Path) -> Served:
    """A real serve before the recorder, both engines in one."""
    log = tmp_path / "serve.log"
    return Served(processes.start(COMMAND, log=log, environ=recorder.environ()), log)


def exchange(url: str, request: bytes) -> bytes:
    """Send bytes and, for a well-meaning server, an end; read until it closes."""
    parts = urlsplit(url)
    last = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as client:
        data = b""
        try:
            client.sendall(request + last)
            while piece := client.recv(65_536):
                data += piece
        except ConnectionError:
            pass
        return data


def paths(recorder: Recorder) -> list[bytes]:
    return [asked.line.split(b" ")[1] for asked in recorder.requests()]


def test_what_is_ambiguous_is_refused_and_never_seen_by_the_upstream(
    recorder: Recorder, served: Served
) -> None:
    for request in REFUSED:
        data = exchange(served.ollama, request)
        assert data == b"" or data[9:12] in {b"400", b"501"}, (request, data[:60])
        assert paths(recorder) == [], request
    served.wait_state("idle")


def test_what_has_one_meaning_reaches_the_upstream_with_that_meaning(
    recorder: Recorder, served: Served
) -> None:
    for number, (request, body) in enumerate(ONE_MEANING.items()):
        numbered = request.replace(b" /x", b" /%d/x" % number)
        data = exchange(served.ollama, numbered)
        assert b" 200 OK\r\n" in data, (request, data[:60])
        start = b"POST /%d/x" % number
        (seen,) = [asked for asked in recorder.requests() if asked.line.startswith(start)]
        assert (seen.body, seen.whole) == (body, True), request
        assert b"http2-settings" not in dict(seen.headers)
    assert len(recorder.requests()) == len(ONE_MEANING)


def test_a_body_with_two_framings_hides_no_second_request(
    recorder: Recorder, served: Served
) -> None:
    for request in BOTH:
        data = exchange(served.ollama, request)
        (answer,) = read_answers(data)
        assert answer.status in {200, 400}, data[:60]
    assert set(paths(recorder)) <= {b"/x"}


def test_a_body_whose_chunks_make_no_sense_never_ends_for_the_upstream(
    recorder: Recorder, served: Served
) -> None:
    for path in (b"/x", b"/api/chat", b"/api/pull"):
        for body in SENSELESS:
            line = b"POST %s HTTP/1.1" % path
            data = exchange(served.ollama, chunked(b"chunked", body, line=line))
            assert b" 200 OK\r\n" not in data, (body, data[:60])
    assert not [asked for asked in recorder.requests() if asked.whole]
    served.wait_state("idle", waiting={"llm": 0, "image": 0, "bytes": 0})
    assert call("GET", f"{served.admin}/healthz").status == 200
