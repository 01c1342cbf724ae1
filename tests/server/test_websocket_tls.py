"""Websockets to an upstream that speaks TLS and wants a login and a path prefix."""

import asyncio
import base64
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.server.inloop import proxy
from tests.server.websocket_peers import client, echo

pytestmark = [
    pytest.mark.usefixtures("gpu_dir", "gpu_key"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates"),
]

MAKE_CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=engine"
    " -addext subjectAltName=DNS:localhost -keyout key.pem -out certificate.pem"
)


@asynccontextmanager
async def engine(folder: Path, requests: list[web.Request]) -> AsyncIterator[int]:
    """A TLS server with a certificate of its own making, in `folder`; its port."""

    async def handle(request: web.Request) -> web.WebSocketResponse:
        requests.append(request)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await echo(socket)
        return socket

    await asyncio.to_thread(
        subprocess.run, MAKE_CERTIFICATE.split(), cwd=folder, check=True, capture_output=True
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    app = web.Application()
    app.router.add_get("/engine/a%2Fb/ws", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_tls_login_and_prefix_of_the_url_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[web.Request] = []
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
    async with engine(tmp_path, requests) as port:
        url = f"https://me:p%40ss@localhost:{port}/engine/a%2Fb/"
        async with proxy(comfy_url=url) as bound:
            sent = {"Authorization": "Bearer mine"}
            async with client(bound.comfy_url, "/ws?x=%2F", headers=sent) as socket:
                await socket.send_bytes(bytes(200_000))
                assert await socket.receive_bytes() == bytes(200_000)

    assert requests[0].raw_path == "/engine/a%2Fb/ws?x=%2F"
    login = b"Basic " + base64.b64encode(b"me:p@ss")
    assert requests[0].headers.getall("Authorization") == [login.decode()]


async def test_a_certificate_that_nobody_vouches_for_is_a_502(tmp_path: Path) -> None:
    requests: list[web.Request] = []
    async with (
        engine(tmp_path, requests) as port,
        proxy(comfy_url=f"https://localhost:{port}/engine/a%2Fb") as bound,
    ):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            async with client(bound.comfy_url, "/ws"):
                pass

    assert refusal.value.status == 502
    assert not requests


async def test_tls_to_an_upstream_that_speaks_none_is_a_502() -> None:
    async with (
        proxy() as other,
        proxy(comfy_url=str(other.admin_url).replace("http://", "https://")) as bound,
    ):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            async with client(bound.comfy_url, "/ws"):
                pass

    assert refusal.value.status == 502
