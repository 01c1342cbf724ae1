"""Where the upstream client connects to, and what it says when it cannot."""

import asyncio
import base64
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from ocgpu.server.relay.address import Address
from ocgpu.server.relay.client import HttpUpstream
from ocgpu.server.relay.connector import Connector
from ocgpu.server.relay.upstream import UpstreamConnectError, UpstreamRefusedError
from ocgpu.server.relay.websocket_upstream import open_socket
from tests.link_local import link_local
from tests.server.inloop import RawUpstream
from tests.server.upstreams import OK, Server, fetch

TLS = Path(__file__).parents[1] / "data" / "tls"


async def test_a_prefix_and_a_login_of_the_url_go_into_every_request() -> None:
    server = Server()
    async with RawUpstream(server) as raw:
        place = raw.url.removeprefix("http://")
        upstream = HttpUpstream(f"http://me:p%40ss@{place}/ollama/", 1.0)
        headers = [(b"host", b"x"), (b"authorization", b"Bearer of the client")]
        for method, target in (("GET", b"/api/tags?a"), ("OPTIONS", b"*")):
            async with upstream.request(method, target, headers, None, fresh=True):
                pass
        await upstream.close()

    login = b"authorization: Basic " + base64.b64encode(b"me:p@ss")
    assert server.heads == [
        [b"GET /ollama/api/tags?a HTTP/1.1", b"host: x", login],
        [b"OPTIONS * HTTP/1.1", b"host: x", login],
    ]
    assert upstream.url == f"http://{place}/ollama"
    assert upstream.authority == place.encode()


async def test_an_address_in_ipv6_is_reached() -> None:
    server = await asyncio.start_server(_answer, "::1", 0)
    async with server:
        upstream = HttpUpstream(f"http://[::1]:{server.sockets[0].getsockname()[1]}", 1.0)
        assert await fetch(upstream) == (200, b"ok")
        await upstream.close()


async def test_a_name_with_an_address_that_refuses_is_reached_at_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What many machines say of `localhost`; the engine listens on the second alone.
    loop = asyncio.get_running_loop()

    async def both(host: str, port: int, **_options: object) -> list[tuple]:
        kind = (socket.SOCK_STREAM, 6, "")
        return [
            (socket.AF_INET, *kind, ("127.0.0.2", port)),
            (socket.AF_INET, *kind, ("127.0.0.1", port)),
        ]

    monkeypatch.setattr(loop, "getaddrinfo", both)
    async with RawUpstream(Server()) as raw:
        upstream = HttpUpstream(raw.url.replace("127.0.0.1", "localhost"), 1.0)
        assert await fetch(upstream) == (200, b"ok")
        await upstream.close()


async def test_a_name_with_a_link_local_address_is_reached_by_its_zone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = link_local()
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def known(asked: str, port: int, **options: Any) -> list[tuple]:  # noqa: ANN401
        return await real(here if asked == "engine.test" else asked, port, **options)

    server = await asyncio.start_server(_answer, here, 0)
    monkeypatch.setattr(loop, "getaddrinfo", known)
    async with server:
        upstream = HttpUpstream(f"http://engine.test:{server.sockets[0].getsockname()[1]}", 1.0)
        assert await fetch(upstream) == (200, b"ok")
        await upstream.close()


async def test_a_name_that_nobody_knows_is_an_error_that_says_so() -> None:
    upstream = HttpUpstream("http://no-such-name.invalid:1", 5.0)
    with pytest.raises(UpstreamConnectError, match=r"no connection to http://no-such-name"):
        await fetch(upstream)
    await upstream.close()


async def test_nobody_at_the_port_is_an_error_of_its_own() -> None:
    async with RawUpstream(Server()) as raw:
        url = raw.url
    upstream = HttpUpstream(url, 1.0)
    with pytest.raises(UpstreamRefusedError, match="nothing listens at"):
        await fetch(upstream)
    await upstream.close()


async def test_a_connection_that_does_not_come_about_ends_with_the_time_for_it() -> None:
    # A full backlog of a socket that nobody accepts from: the next SYN is not answered.
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for client in (first, second):
            client.setblocking(False)  # noqa: FBT003
            client.connect_ex(full.getsockname())
        upstream = HttpUpstream(f"http://127.0.0.1:{full.getsockname()[1]}", 0.2)
        with pytest.raises(UpstreamConnectError, match="did not answer in time"):
            await fetch(upstream)
        await upstream.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_an_https_upstream_is_reached_and_its_certificate_checked(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, ssl=context)
    async with server:
        url = f"https://{host}:{server.sockets[0].getsockname()[1]}"
        stranger = HttpUpstream(url, 2.0)
        with pytest.raises(UpstreamConnectError, match=f"no TLS with {url}: self-signed"):
            await fetch(stranger)
        with pytest.raises(UpstreamConnectError, match=f"no TLS with {url}: self-signed"):
            await open_socket(Connector(Address.parse(url), 2.0), b"")
        monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "cert.pem"))
        upstream = HttpUpstream(url, 2.0)
        assert await fetch(upstream) == (200, b"ok")
        await upstream.close()
        await stranger.close()


async def test_tls_with_a_server_that_speaks_none_is_an_error_that_says_so() -> None:
    async with RawUpstream(Server()) as raw:
        upstream = HttpUpstream(raw.url.replace("http:", "https:"), 1.0)
        with pytest.raises(UpstreamConnectError):
            await fetch(upstream)
        await upstream.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(OK)
    await writer.drain()
    writer.close()
