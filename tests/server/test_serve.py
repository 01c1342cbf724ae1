"""Start, refusals and drain of a whole server."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ocgpu.forms import Listen
from ocgpu.server.serve import serve
from ocgpu.settings import Settings
from tests.server.inloop import Connection, RawUpstream, connect, exchange, proxy
from tests.server.requests import CHAT, Engine, get, json_of, status_of, waiting
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")


async def test_a_full_queue_is_a_503_that_says_when_and_why() -> None:
    engine = Engine()
    async with RawUpstream(engine) as raw, proxy(raw.url, raw.url, max_queue=1) as bound:
        chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT))
        await waiting(bound.ollama_url, llm_inflight=1)
        image = await connect(bound.comfy_url)
        await image.write(CHAT.replace(b"/api/chat", b"/prompt"))
        await waiting(bound.ollama_url, waiting={"llm": 0, "image": 1, "bytes": 4})

        answer = await exchange(bound.ollama_url, CHAT)

        assert status_of(answer) == 503
        assert b"retry-after: " in answer
        assert json_of(answer)["reason"] == "queue_full"
        await image.close()
        await waiting(bound.ollama_url, waiting={"llm": 0, "image": 0, "bytes": 2})
        engine.go_on.set()
        await chat


async def test_a_body_beyond_the_bound_of_all_is_a_413() -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url, max_waiting_bytes=1) as bound:
        answer = await exchange(bound.ollama_url, CHAT)

        assert status_of(answer) == 413
        assert json_of(answer)["reason"] == "body_too_large"
        document = json_of(await exchange(bound.ollama_url, get("/healthz")))
        assert document["waiting"]["bytes"] == 0


async def test_an_unload_command_passes_while_an_image_waits() -> None:
    engine = Engine()
    async with RawUpstream(engine) as raw, proxy(raw.url, raw.url) as bound:
        chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT))
        await waiting(bound.ollama_url, llm_inflight=1)
        image = await connect(bound.comfy_url)
        await image.write(CHAT.replace(b"/api/chat", b"/prompt"))
        await waiting(bound.ollama_url, image_pending=True)
        body = b'{"model":"m","keep_alive":0}'
        request = b"POST /api/generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"

        answer = await exchange(
            bound.ollama_url, request + b"Content-Length: %d\r\n\r\n" % len(body) + body
        )

        assert status_of(answer) == 404, "the upstream's own answer"
        await image.close()
        engine.go_on.set()
        await chat


async def test_a_drain_lets_requests_end_refuses_waiters_and_says_503() -> None:
    engine = Engine()
    health: list[bytes] = []
    async with RawUpstream(engine) as raw:
        async with proxy(raw.url, raw.url, drain_timeout=5.0) as bound:
            chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT))
            await waiting(bound.ollama_url, llm_inflight=1)
            image = asyncio.ensure_future(
                exchange(bound.comfy_url, CHAT.replace(b"/api/chat", b"/prompt"))
            )
            await waiting(bound.ollama_url, image_pending=True)

            async def look_while_draining() -> None:
                answer = await image
                assert status_of(answer) == 503
                assert json_of(answer)["reason"] == "shutdown"
                health.append(await exchange(bound.ollama_url, get("/healthz")))
                engine.go_on.set()

            looking = asyncio.ensure_future(look_while_draining())
        await looking
        assert (await chat).endswith(b"chat")

    assert status_of(health[0]) == 503
    assert json_of(health[0])["draining"] is True


async def test_what_does_not_end_in_the_drain_is_cut() -> None:
    engine = Engine()
    async with RawUpstream(engine) as raw:
        async with proxy(raw.url, drain_timeout=0.05) as bound:
            chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT))
            await waiting(bound.ollama_url, llm_inflight=1)
        answer = await chat

    assert b"chat" not in answer


async def test_a_taken_port_is_named_and_leaves_nothing_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        port = taken.getsockname()[1]
        free = other.getsockname()[1]
        other.close()
        settings = Settings(
            listen_ollama=Listen(host="127.0.0.1", port=free),
            listen_comfy=Listen(host="127.0.0.1", port=port),
            listen_admin=None,
        )

        assert await serve(settings) == 1

        message = f"cannot listen on 127.0.0.1:{port}: address already in use; "
        assert message + "stop what listens there or set `LISTEN_COMFY`" in caplog.text
        socket.create_server(("127.0.0.1", free)).close()


async def test_a_second_server_on_the_same_port_does_not_start() -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url) as bound:
        port = int(str(bound.ollama_url).rpartition(":")[2])
        listen = Listen(host="127.0.0.1", port=port)
        settings = Settings(listen_ollama=listen, comfy_url="", listen_admin=None)

        assert await serve(settings) == 1


async def test_all_interfaces_means_both_protocols() -> None:
    bound = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    everywhere = Listen(host="::", port=0)
    settings = Settings(listen_ollama=everywhere, comfy_url="", listen_admin=None)
    serving = asyncio.ensure_future(serve(settings, ready=bound.set_result, stop=stop))
    url = (await bound).ollama_url
    port = int(url.rpartition(":")[2])
    families = ["127.0.0.1", "::1"] if socket.has_ipv6 else ["127.0.0.1"]

    for host in families:
        client = Connection(*await asyncio.open_connection(host, port))
        await client.write(get("/healthz"))
        assert status_of(await client.rest()) == 200
        await client.close()

    stop.set()
    assert await serving == 0


async def test_an_upstream_that_is_off_has_no_listener() -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url, listen_admin=None) as bound:
        assert bound.comfy_url is None
        assert bound.admin_url is None


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    program = """
import sys
from ocgpu.forms import Listen
from ocgpu.server.serve import run
from ocgpu.settings import Settings
here = Listen(host="127.0.0.1", port=0)
sys.exit(run(Settings(listen_ollama=here, listen_comfy=None, listen_admin=None,
    ollama_url=sys.argv[1], comfy_url="", drain_timeout=600.0, log_format="json")))
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        upstream = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", program, upstream],
            stderr=subprocess.PIPE,
            env={**os.environ, "OCGPU_DIR": str(tmp_path)},
        )
        assert process.stderr is not None
        try:
            url = message_of(process, "listening")["url"]
            client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
            client.sendall(CHAT)
            message_of(process, "state: llm")

            process.send_signal(signal.SIGTERM)
            message_of(process, "draining")
            # More than once: what comes within an instant of the first counts as the first.
            wait_until(lambda: process.send_signal(signal.SIGTERM) or process.poll() is not None)

            assert process.wait(timeout=10) == 1
            client.close()
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


def message_of(process: "subprocess.Popen[bytes]", message: str) -> dict:
    """Read the log up to a message."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(b"{") and json.loads(line)["message"] == message:
            return json.loads(line)
    raise AssertionError(message)
