"""Start, own endpoints, control plane, refusals and drain of a whole server."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ocgpu
from ocgpu.forms import Listen
from ocgpu.server.serve import serve
from ocgpu.settings import Settings
from tests.server.inloop import Connection, RawUpstream, connect, exchange, proxy

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

CHAT = b"POST /api/chat HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def post(path: str, *headers: str) -> bytes:
    return get(path, "Content-Length: 0", *headers, method="POST")


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def json_of(answer: bytes) -> dict:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


class Engine:
    """Answers everything, and a chat only when it is let go."""

    def __init__(self, props: bytes = b"") -> None:
        self.go_on = asyncio.Event()
        self.chats = 0
        self.props = props

    async def __call__(self, connection: Connection) -> None:
        head = await connection.head()
        if b"/api/chat" in head[0]:
            await connection.read(2)
            self.chats += 1
            await self.go_on.wait()
            await connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nchat")
        elif b"/props" in head[0] and self.props:
            await connection.write(self.props)
        else:
            await connection.write(
                b"HTTP/1.1 404 No\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
            )


async def test_health_is_answered_on_every_listener_for_get_and_head() -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url, raw.url) as bound:
        for url in (bound.ollama_url, bound.comfy_url, bound.admin_url):
            answer = await exchange(url, get("/healthz"))
            assert status_of(answer) == 200
            document = json_of(answer)
            assert document["state"] == "idle"
            assert document["llm_inflight"] == 0
            assert document["image_pending"] is False
            assert document["lease"]["enabled"] is False
            assert document["version"] == ocgpu.__version__

            head = await exchange(url, get("/healthz", method="HEAD"))
            assert status_of(head) == 200
            assert head.endswith(b"\r\n\r\n")


async def test_health_does_not_wait_for_a_silent_upstream() -> None:
    async def silent(connection: Connection) -> None:
        await connection.rest()

    async with RawUpstream(silent) as raw, proxy(raw.url, raw.url) as bound:
        document = json_of(await exchange(bound.ollama_url, get("/healthz")))

    assert document["upstreams"]["ollama"] == {
        "url": raw.url,
        "reachable": None,
        "version": None,
        "checked_ago_seconds": None,
    }


async def test_own_paths_of_one_listener_are_the_upstreams_on_another() -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url, raw.url) as bound:
        assert status_of(await exchange(bound.ollama_url, get("/metrics"))) == 200
        assert status_of(await exchange(bound.admin_url, get("/metrics"))) == 200
        assert status_of(await exchange(bound.comfy_url, get("/metrics"))) == 404
        assert status_of(await exchange(bound.ollama_url, get("/events"))) == 404
        assert status_of(await exchange(bound.ollama_url, post("/gpulock/release"))) == 404


async def test_serve_is_a_peer_of_its_gpu(gpu_key: str) -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url, gpu_key=gpu_key) as bound:
        document = json_of(await exchange(bound.ollama_url, get("/gpu/peers")))

        assert document["gpu_key"] == gpu_key
        assert document["self"]["name"] == "ocgpu-serve"
        assert document["self"]["pid"] == os.getpid()
        assert document["self"]["active"] is False
        assert [peer.name for peer in ocgpu.peers(gpu_key).peers] == ["ocgpu-serve"]
        text = (await exchange(bound.admin_url, get("/metrics"))).decode()
        assert "gpushare_peers 1\n" in text

    assert ocgpu.peers(gpu_key).peers == []


async def test_serve_is_active_while_the_lock_is_not_idle(gpu_key: str) -> None:
    engine = Engine()
    async with RawUpstream(engine) as raw, proxy(raw.url, gpu_key=gpu_key) as bound:
        chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT))
        await waiting(bound.ollama_url, llm_inflight=1)
        assert ocgpu.peers(gpu_key).peers[0].active

        engine.go_on.set()
        await chat

        assert not ocgpu.peers(gpu_key).peers[0].active


async def test_props_of_an_engine_without_them_are_our_block_alone(gpu_key: str) -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url, gpu_key=gpu_key) as bound:
        answer = await exchange(bound.ollama_url, get("/props"))

    block = json_of(answer)["opencoti"]["gpu_share"]
    assert status_of(answer) == 200
    assert block["enabled"] is True
    assert block["gpu_key"] == gpu_key
    assert block["self"]["name"] == "ocgpu-serve"
    assert block["peers"] == []


@pytest.mark.parametrize(
    ("props", "status", "keys"),
    [
        (
            b'200 OK\r\nContent-Length: 31\r\n\r\n{"n_ctx":1,"opencoti":{"a":[]}}',
            200,
            ["a", "gpu_share"],
        ),
        (b"200 OK\r\nContent-Length: 4\r\n\r\n[12]", 200, None),
        (b"503 Busy\r\nContent-Length: 2\r\n\r\n{}", 503, None),
    ],
)
async def test_props_of_the_engine_keep_what_is_theirs(
    props: bytes, status: int, keys: list[str] | None
) -> None:
    engine = Engine(b"HTTP/1.1 " + props)
    async with RawUpstream(engine) as raw, proxy(raw.url) as bound:
        answer = await exchange(bound.ollama_url, get("/props"))

    assert status_of(answer) == status
    if keys is None:
        assert answer.partition(b"\r\n\r\n")[2] == props.partition(b"\r\n\r\n")[2]
    else:
        assert json_of(answer)["n_ctx"] == 1
        assert sorted(json_of(answer)["opencoti"]) == keys


async def test_release_resets_the_lock_and_the_owner_in_flight_does_no_harm() -> None:
    engine = Engine()
    async with RawUpstream(engine) as raw, proxy(raw.url) as bound:
        chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT))
        await waiting(bound.ollama_url, llm_inflight=1)

        answer = await exchange(bound.admin_url, post("/gpulock/release"))

        assert json_of(answer) == {"state": "llm", "released": 1}
        await waiting(bound.ollama_url, state="idle", llm_inflight=0)
        engine.go_on.set()
        assert (await chat).endswith(b"chat")
        assert json_of(await exchange(bound.ollama_url, get("/healthz")))["llm_inflight"] == 0
        events = json_of(await exchange(bound.admin_url, get("/events")))
        assert [event["cause"] for event in events] == ["llm request", "reset"]


async def test_unload_evicts_both_engines() -> None:
    calls: list[bytes] = []
    loaded = [b'{"models":[{"name":"m"}]}', b'{"models":[]}']

    async def engine(connection: Connection) -> None:
        head = await connection.head()
        calls.append(head[0].rpartition(b" ")[0])
        body = b"{}"
        if b"/api/ps" in head[0]:
            body = loaded.pop(0)
        await connection.write(
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )

    async with RawUpstream(engine) as raw, proxy(raw.url, raw.url) as bound:
        answer = json_of(await exchange(bound.admin_url, post("/gpulock/unload")))

    assert answer == {"unloaded": ["m"], "comfyui_freed": True}
    assert calls.index(b"POST /api/generate") < calls.index(b"POST /free")


async def test_the_control_plane_wants_its_token() -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url, admin_token="right") as bound:  # noqa: S106
        assert status_of(await exchange(bound.admin_url, post("/gpulock/release"))) == 401
        token = "Authorization: Bearer right"  # noqa: S105 - of this test
        assert status_of(await exchange(bound.admin_url, post("/gpulock/release", token))) == 200
        assert status_of(await exchange(bound.admin_url, get("/healthz"))) == 200


async def test_the_control_plane_refuses_unknown_hosts() -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url) as bound:
        request = post("/gpulock/release").replace(b"localhost", b"evil.example")
        assert status_of(await exchange(bound.admin_url, request)) == 403
        assert status_of(await exchange(bound.admin_url, get("/nothing"))) == 404


async def test_a_full_queue_is_a_503_that_says_when_and_why() -> None:
    engine = Engine()
    async with RawUpstream(engine) as raw, proxy(raw.url, raw.url, max_queue=1) as bound:
        chat = asyncio.ensure_future(exchange(bound.ollama_url, CHAT))
        await waiting(bound.ollama_url, llm_inflight=1)
        image = await connect(bound.comfy_url)
        await image.write(CHAT.replace(b"/api/chat", b"/prompt"))
        await waiting(bound.ollama_url, image_pending=True)

        answer = await exchange(bound.ollama_url, CHAT)

        assert status_of(answer) == 503
        assert b"retry-after: " in answer
        assert json_of(answer)["reason"] == "queue_full"
        await image.close()
        await waiting(bound.ollama_url, image_pending=False)
        engine.go_on.set()
        await chat


async def test_waiting_bodies_beyond_the_bound_are_a_503() -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url, max_waiting_bytes=1) as bound:
        answer = await exchange(bound.ollama_url, CHAT)

        assert status_of(answer) == 503
        assert json_of(answer)["reason"] == "body_memory"
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
            process.send_signal(signal.SIGTERM)

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


async def waiting(url: str, **values: object) -> None:
    """Wait until `/healthz` says so."""
    async with asyncio.timeout(10):
        while True:
            document = json_of(await exchange(url, get("/healthz")))
            if values.items() <= document.items():
                return
            await asyncio.sleep(0.005)
