"""Clients that behave as no client should."""

import signal
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from tests.fakes import Engines
from tests.server.client import OpenCall, call
from tests.server.served import Served
from tests.waiting import wait_until

Serve = Callable[..., Served]
CHAT = {"model": "llama3.2:latest", "messages": [{"role": "user", "content": "hi"}]}


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=20)


def test_a_body_that_stalls_gives_its_memory_back(serve: Serve) -> None:
    served = serve(MAX_WAITING_BYTES="64KiB", STALL_TIMEOUT="2s")
    # Answered at once: it is read whole like any locked request, and then needs no lock.
    unload = {"model": "llama3.2:latest", "keep_alive": 0, "padding": "x" * 8_000}

    def refused() -> bool:
        return call("POST", f"{served.ollama}/api/generate", unload).status == 503

    with connect(served.ollama) as hog:
        head = b"POST /api/chat HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n"
        hog.sendall(head + b"x" * 59_000)
        wait_until(lambda: served.health()["waiting"]["bytes"] == 59_000)
        assert refused()

        wait_until(lambda: served.health()["waiting"]["bytes"] == 0, 20)
        assert not refused()


def test_half_a_request_does_not_keep_it_from_ending_with_0(served: Served) -> None:
    with connect(served.ollama) as half:
        half.sendall(b"POST /api/chat HTTP/1.1\r\nHost: a\r\nX")
        call("GET", f"{served.ollama}/healthz")

        assert served.stop(signal.SIGTERM) == 0


def test_a_request_that_a_drain_cuts_before_its_answer_gets_a_503(
    engines: Engines, serve: Serve
) -> None:
    served = serve(DRAIN_TIMEOUT="200ms")
    hold = engines.ollama.hold_token(0)
    try:
        with OpenCall("POST", f"{served.ollama}/api/chat", {**CHAT, "stream": False}) as waiting:
            served.wait_state("llm")
            served.process.terminate()
            reply = waiting.answer()
    finally:
        hold.open()

    assert reply.status == 503
    assert reply.json()["reason"] == "shutdown"
    assert reply.header("retry-after") is not None


def test_a_signal_told_twice_at_once_is_one_signal(engines: Engines, served: Served) -> None:
    hold = engines.ollama.hold_token(3)
    with OpenCall("POST", f"{served.ollama}/api/chat", CHAT) as chat:
        assert chat.line()
        served.process.terminate()
        served.process.terminate()
        wait_until(lambda: "draining" in served.log.read_text())
        hold.open()
        lines = chat.answer().body.splitlines()

    assert b'"done": true' in lines[-1] or b'"done":true' in lines[-1]
    assert served.process.wait(20) == 0
