"""What we hold Granian to: the hooks that we use are there, the settings that we need are set."""

import asyncio
import importlib.metadata
import inspect
import socket
import sys
from typing import Any

import pytest
from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces, TaskImpl
from granian.server.embed import Server

from ocgpu.forms import Listen
from ocgpu.server.listeners import ListenerServer
from ocgpu.server.serve import Bound, new_event_loop, serve
from ocgpu.server.sockets import bind
from ocgpu.settings import Settings
from tests.server.inloop import RawUpstream, connect, exchange, proxy
from tests.server.requests import Engine, get, status_of

HERE = Listen(host="127.0.0.1", port=0)
ANYWHERE = Settings(
    listen_ollama=HERE, comfy_url="", listen_admin=HERE, ollama_url="http://[::1]:9"
)
HOOKS = ("_init_shared_socket", "startup", "_stop_workers", "_spawn_asgi_worker")


async def nothing(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - any scope
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("name", HOOKS)
def test_granian_still_has_the_private_parts_that_we_build_on(name: str) -> None:
    hint = f"granian {importlib.metadata.version('granian')} has changed: look at `listeners.py`"

    assert callable(getattr(Server, name, None)), hint


@pytest.mark.skipif(sys.platform != "linux", reason="the arguments differ by platform")
def test_granian_still_takes_a_bound_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        holder: Any = SocketHolder
        held = holder(listener.fileno(), False, 16)  # noqa: FBT003 - its arguments have no names

        assert held.get_fd() == listener.fileno()
        assert not held.is_uds()


def test_granian_still_binds_in_the_hook_that_we_replace() -> None:
    assert "self._init_shared_socket()" in inspect.getsource(Server.startup)
    assert "(self._ssp, self._shd)" in inspect.getsource(Server._spawn_worker)


async def test_a_listener_has_the_settings_that_the_guards_ask_for() -> None:
    server = ListenerServer(nothing, bind("127.0.0.1", 0))
    server._listener.close()

    # Its other tasks have a `cancel` that does nothing: no drain would end.
    assert server.task_impl is TaskImpl.asyncio
    # No lifespan: one that fails would be swallowed, and two listeners would run it twice.
    assert server.interface is Interfaces.ASGINL
    assert server.http is HTTPModes.http1
    assert server.backpressure >= 65_536
    assert server.backlog >= 4096
    assert server.http1_settings.header_read_timeout >= 120_000
    assert not server.workers_kill_timeout, "it would raise out of `serve`"
    assert not server.log_enabled


def test_the_loop_is_uvloop_s_where_that_is_at_hand() -> None:
    loop = new_event_loop()
    try:
        wanted = "asyncio" if sys.platform == "win32" else "uvloop"
        assert type(loop).__module__.split(".")[0] == wanted
    finally:
        loop.close()


async def test_a_server_without_requests_ends_and_closes_its_socket() -> None:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = ListenerServer(nothing, listener)
    running = asyncio.ensure_future(server.serve())
    async with asyncio.timeout(10):
        await server.started.wait()
        assert status_of(await exchange(f"http://127.0.0.1:{port}", get("/"))) == 204
        idle = await connect(f"http://127.0.0.1:{port}")
        server.end()
        await running
        assert await idle.rest() == b""
        await idle.close()
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
async def test_a_listener_that_cannot_start_ends_serving_with_1(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Bound] = []

    def fail(_server: ListenerServer) -> None:
        raise OSError("no threads left")

    monkeypatch.setattr(ListenerServer, "_init_shared_socket", fail)
    async with asyncio.timeout(20):
        assert await serve(ANYWHERE, ready=told.append) == 1

    assert "a listener ended: no threads left" in caplog.text
    assert told == [], "it never served"


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
async def test_a_listener_that_ends_by_itself_ends_serving_with_1(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bound: asyncio.Future[Bound] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(serve(ANYWHERE, ready=bound.set_result))
    async with asyncio.timeout(20):
        url = (await bound).ollama_url
        names = {task: task.get_coro().__qualname__ for task in asyncio.all_tasks()}
        workers = [task for task, name in names.items() if name == "Server._spawn_asgi_worker"]
        assert len(workers) == 2

        workers[0].cancel()

        assert await serving == 1
    assert "a listener ended" in caplog.text
    with pytest.raises(ConnectionRefusedError):
        await connect(str(url))


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
async def test_more_connections_than_granian_s_default_are_all_served() -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url) as bound:
        idle = [await connect(bound.ollama_url) for _ in range(200)]

        assert status_of(await exchange(bound.ollama_url, get("/healthz"))) == 200
        for client in idle:
            await client.close()


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
@pytest.mark.parametrize("path", ["/healthz/", "//healthz", "/schema", "/x//y/../z/%2e", "/%68x"])
async def test_no_path_of_the_upstream_s_is_changed_or_taken_by_the_control_plane(
    path: str,
) -> None:
    seen: list[bytes] = []

    upstream = RawUpstream(lambda connection: note(connection, seen))
    async with upstream as raw, proxy(raw.url, listen_admin=None) as bound:
        assert status_of(await exchange(bound.ollama_url, get(path))) == 404
    assert b"GET " + path.encode() + b" HTTP/1.1" in seen


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
async def test_a_head_of_our_own_paths_is_answered() -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url) as bound:
        answer = await exchange(bound.ollama_url, get("/healthz", method="HEAD"))

        assert status_of(answer) == 200
        assert answer.endswith(b"\r\n\r\n")


async def note(connection: Any, seen: list[bytes]) -> None:  # noqa: ANN401
    head = await connection.head()
    seen.append(head[0])
    await connection.write(b"HTTP/1.1 404 No\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
