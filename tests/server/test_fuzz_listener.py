"""Whatever bytes a client sends to a real serve: it lives on, and an engine sees none in disorder.

`FUZZ_SECONDS=600` goes on for so long with other bytes each time.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.processes import Processes
from tests.server.recorder import Recorder
from tests.server.served import COMMAND, Served
from tests.server.wire import read_answers

SECONDS = int(os.environ.get("FUZZ_SECONDS", "0"))
EXAMPLES = 150
# What is not answered after so long waits for more bytes.
PATIENCE_SECONDS = 0.03

words = st.sampled_from
noise = st.binary(max_size=40)
methods = words((b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"CONNECT", b"post", b"PRI", b""))
targets = words(
    (
        *(b"/x", b"/api/chat", b"/api/generate", b"/prompt", b"/healthz", b"/gpu/peers", b"/props"),
        *(b"/gpulock/release", b"//x", b"/%70rompt", b"*", b"http://y/x", b"/x y", b"/%zz", b"?"),
    )
)
versions = words((b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"http/1.1", b""))
names = words(
    (
        *(b"Host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Upgrade", b"Expect"),
        *(b"TE", b"Trailer", b"Origin", b"Content-Length ", b" Host", b"X-A", b"Cookie", b""),
    )
)
values = words(
    (
        *(b"x", b"2", b"0", b"+2", b"-1", b"2, 2", b"chunked", b"gzip, chunked", b"xchunked"),
        *(b"identity", b"close", b"keep-alive", b"content-length", b"websocket", b"100-continue"),
        *(b"2\r\n folded", b"a\0b", b"\xff", b"9" * 30, b""),
    )
)
ends = words((b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b""))
bodies = words(
    (b"", b"ok", b"{}", b"2\r\nok\r\n0\r\n\r\n", b"2;a=b\r\nok\r\n0\r\nX: y\r\n\r\n", b"F\r\n")
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request that may well be wrong in any place."""
    line = b" ".join((draw(methods), draw(targets), draw(versions)))
    host = draw(words((b"", b"Host: x", b"Host: localhost", b"Host: a@b")))
    headers = [host] if host else []
    for _ in range(draw(st.integers(0, 4))):
        value = draw(st.one_of(values, noise))
        headers.append(draw(names) + b": " + value)
    head = b"".join(part + draw(ends) for part in (line, *headers))
    return head + draw(ends) + draw(st.one_of(bodies, noise))


streams = st.one_of(st.lists(requests(), min_size=1, max_size=3).map(b"".join), st.binary())


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as started:
        yield started


@pytest.fixture
def served(recorder: Recorder, processes: Processes, tmp_path: Path) -> Served:
    log = tmp_path / "serve.log"
    environ = {**recorder.environ(), "STALL_TIMEOUT": "1s"}
    return Served(processes.start(COMMAND, log=log, environ=environ), log)


def send(url: str, data: bytes) -> bytes:
    """Send bytes; give what came back before it grew quiet."""
    parts = urlsplit(url)
    answer = b""
    with (
        socket.create_connection((parts.hostname, parts.port), timeout=10) as client,
        contextlib.suppress(ConnectionError, TimeoutError),
    ):
        client.sendall(data)
        client.settimeout(PATIENCE_SECONDS)
        while piece := client.recv(65_536):
            answer += piece
    return answer


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 180)
def test_no_bytes_of_a_client_harm_serve_or_reach_an_engine_in_disorder(
    recorder: Recorder, served: Served
) -> None:
    urls = (served.ollama, served.comfy, served.admin)

    @seed(SECONDS and time.time_ns())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(urls), streams)
    def throw(url: str, data: bytes) -> None:
        # What a handler raises ends as a 500 without a word.
        assert b"HTTP/1.1 500 " not in send(url, data)
        assert served.process.poll() is None
        recorder.requests()

    until = time.monotonic() + SECONDS
    throw()
    while time.monotonic() < until:
        throw()
    empty = {"llm": 0, "image": 0, "bytes": 0}
    served.wait_state("idle", llm_inflight=0, image_pending=False, waiting=empty)
    for url in urls:
        data = send(url, b"GET /healthz HTTP/1.1\r\nHost: x.localhost\r\nConnection: close\r\n\r\n")
        assert read_answers(data)[0].status == 200
    assert served.stop(signal.SIGTERM) == 0
    drains = [line for line in served.lines() if line["message"] == "draining"]
    assert [line["requests"] for line in drains] == [0]
    assert not [line for line in served.lines() if line["level"] == "error"], served.log
    assert "Traceback" not in served.log.read_text()
