"""Which paths are ours on which listener, and who may ask for them there."""

import json

import pytest

from tests.server.inloop import Connection, RawUpstream, connect, exchange, proxy
from tests.server.requests import get, json_of, post, status_of

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

# What is not exactly ours belongs to the upstream, as with any transparent proxy.
THEIRS = [
    "GET //healthz",
    "GET /healthz/",
    "GET /healthz;x",
    "GET /healthz%2F",
    "GET /healthz%00",
    "GET /healthz%3Fx",
    "GET /./healthz",
    "GET /x/../healthz",
    "GET /Healthz",
    "GET /%2568ealthz",
    "POST /healthz",
    "OPTIONS /healthz",
    "DELETE /healthz",
    "get /healthz",
    "GET /ocgpu/schema/openapi.json",
    "GET /ocgpu/schema",
    "GET /events",
    "POST /gpulock/release",
    "POST //gpulock/release",
    "POST /gpulock/release/",
    "POST /%67pulock/release",
    "POST /gpulock%2Frelease",
    "POST /healthz/../gpulock/release",
    "POST /metrics/../gpulock/release",
    "POST http://localhost:8190/gpulock/release",
    "POST http://localhost:8190/gpulock/unload",
    "GET http://evil.example/elsewhere",
]
OURS = [
    "GET /healthz",
    "HEAD /healthz",
    "GET /healthz?x",
    "GET /healthz?/x",
    "GET /%68ealthz",
    "GET /%68%65althz?x=1",
    "GET /healthz#x",
    "GET http://localhost/healthz",
]
LANGUAGE = "Accept-Language: en"


class Echo:
    """Answers `theirs`; notes the first lines of what came."""

    def __init__(self, *headers: bytes) -> None:
        self.lines: list[bytes] = []
        self._headers = headers

    async def __call__(self, connection: Connection) -> None:
        head = await connection.head()
        self.lines.append(head[0])
        lines = [b"HTTP/1.1 200 OK", b"Content-Length: 12", b"Connection: close", *self._headers]
        await connection.write(b"\r\n".join(lines) + b"\r\n\r\n" + b'{"theirs":1}')


def ask(line: str, *headers: str) -> bytes:
    method, path = line.split(" ")
    more = ("Content-Length: 0",) if method == "POST" else ()
    return get(path, *more, *headers, method=method)


@pytest.mark.parametrize("listener", ["ollama_url", "comfy_url"])
async def test_what_is_not_exactly_ours_is_the_upstreams(listener: str) -> None:
    echo = Echo()
    async with RawUpstream(echo) as raw, proxy(raw.url, raw.url) as bound:
        for line in THEIRS:
            answer = await exchange(getattr(bound, listener), ask(line))
            assert json_of(answer) == {"theirs": 1}, line
        events = await exchange(bound.admin_url, get("/events"))

    assert all("reset" not in event["cause"] for event in json_of(events))
    assert b"GET /elsewhere HTTP/1.1" in echo.lines


@pytest.mark.parametrize("listener", ["ollama_url", "comfy_url", "admin_url"])
async def test_what_is_ours_is_answered_in_every_spelling_that_means_the_same(
    listener: str,
) -> None:
    async with RawUpstream(Echo()) as raw, proxy(raw.url, raw.url) as bound:
        for line in OURS:
            answer = await exchange(getattr(bound, listener), ask(line))
            assert status_of(answer) == 200, line
            if not line.startswith("HEAD"):
                assert json_of(answer)["state"] == "idle", line


@pytest.mark.parametrize("listener", ["ollama_url", "comfy_url", "admin_url"])
async def test_there_is_one_host_or_none_is_served(listener: str) -> None:
    echo = Echo()
    async with RawUpstream(echo) as raw, proxy(raw.url, raw.url) as bound:
        url = getattr(bound, listener)
        for request in (
            get("/x", "Host: localhost"),
            get("/healthz", "Host: evil.example"),
            get("/x").replace(b"Host: localhost\r\n", b""),
            get("/x").replace(b"Host: localhost\r\n", b"Host: \r\n"),
            get("/ws", "Host: b", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
        ):
            assert status_of(await exchange(url, request)) == 400, request

    assert not [line for line in echo.lines if b"/x" in line]


async def test_a_second_host_opens_no_websocket() -> None:
    echo = Echo()
    handshake = get(
        "/ws",
        "Host: evil.example",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ).replace(b"Connection: close", b"Connection: Upgrade")
    async with RawUpstream(echo) as raw, proxy(raw.url, raw.url) as bound:
        client = await connect(bound.comfy_url)
        await client.write(handshake)
        head = await client.head()
        await client.close()

    assert status_of(head[0]) == 403
    assert not [line for line in echo.lines if b"/ws" in line]


async def test_a_page_whose_name_was_rebound_reads_nothing_of_ours() -> None:
    async with RawUpstream(Echo()) as raw, proxy(raw.url, raw.url) as bound:
        for url, path in (
            (bound.ollama_url, "/healthz"),
            (bound.ollama_url, "/metrics"),
            (bound.ollama_url, "/gpu/peers"),
            (bound.ollama_url, "/%67pu/peers"),
            (bound.comfy_url, "/healthz"),
        ):
            page = get(path, LANGUAGE).replace(b"localhost", b"evil.example:11435")
            answer = await exchange(url, page)
            assert status_of(answer) == 403, path
            assert json_of(answer)["reason"] == "host", path
            cross = get(path, "Sec-Fetch-Site: cross-site")
            assert status_of(await exchange(url, cross)) == 403, path
            monitor = get(path).replace(b"localhost", b"ai.example.com")
            assert status_of(await exchange(url, monitor)) == 200, path


async def test_props_for_a_foreign_page_are_the_engines_own() -> None:
    async with RawUpstream(Echo()) as raw, proxy(raw.url) as bound:
        mine = json_of(await exchange(bound.ollama_url, get("/props", LANGUAGE)))
        rebound = get("/props", LANGUAGE).replace(b"localhost", b"evil.example")
        foreign = json_of(await exchange(bound.ollama_url, rebound))

    assert mine["opencoti"]["gpu_share"]["enabled"] is True
    assert foreign == {"theirs": 1}


async def test_a_name_of_the_settings_is_ours_for_a_page_too() -> None:
    names = ("gpu.example.org",)
    async with RawUpstream(Echo()) as raw, proxy(raw.url, admin_hosts=names) as bound:
        page = get("/gpu/peers", LANGUAGE).replace(b"localhost", b"gpu.example.org")
        assert status_of(await exchange(bound.ollama_url, page)) == 200
        assert status_of(await exchange(bound.admin_url, page)) == 200


async def test_our_answers_are_of_no_use_to_a_page_that_embeds_them() -> None:
    async with RawUpstream(Echo()) as raw, proxy(raw.url, raw.url) as bound:
        for url, path in (
            (bound.admin_url, "/"),
            (bound.admin_url, "/nothing"),
            (bound.ollama_url, "/gpu/peers"),
            (bound.comfy_url, "/healthz"),
        ):
            head = (await exchange(url, get(path))).partition(b"\r\n\r\n")[0].lower()
            assert b"\r\nx-content-type-options: nosniff" in head, path
            assert b"\r\ncross-origin-resource-policy: same-origin" in head, path
            assert b"frame-ancestors 'none'" in head, path
            assert b"access-control-" not in head, path


async def test_a_preflight_is_never_answered_with_leave() -> None:
    async with RawUpstream(Echo()) as raw, proxy(raw.url, admin_token="t") as bound:  # noqa: S106
        preflight = get(
            "/gpulock/release",
            "Origin: http://evil.example",
            "Access-Control-Request-Method: POST",
            "Access-Control-Request-Headers: authorization",
            method="OPTIONS",
        )
        answer = await exchange(bound.admin_url, preflight)

        assert status_of(answer) == 403
        assert b"access-control-" not in answer.lower()


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"]
)
async def test_a_form_of_a_foreign_page_resets_nothing(kind: str) -> None:
    async with RawUpstream(Echo()) as raw, proxy(raw.url) as bound:
        for origin in ("http://evil.example", "null"):
            form = post("/gpulock/release", f"Content-Type: {kind}", f"Origin: {origin}")
            assert status_of(await exchange(bound.admin_url, form)) == 403
        assert json_of(await exchange(bound.admin_url, get("/events"))) == []


async def test_the_schema_stands_on_the_admin_listener_alone_and_loads_no_script() -> None:
    async with RawUpstream(Echo()) as raw, proxy(raw.url, admin_token="t") as bound:  # noqa: S106
        path = "/ocgpu/schema/openapi.json"
        assert status_of(await exchange(bound.admin_url, get(path))) == 401
        token = "Authorization: Bearer t"  # noqa: S105 - of this test
        schema = json_of(await exchange(bound.admin_url, get(path, token)))
        for page in ("/ocgpu/schema", "/ocgpu/schema/swagger", "/ocgpu/schema/redoc"):
            assert b"<script" not in await exchange(bound.admin_url, get(page, token))

    assert set(schema["paths"]) == {
        "/",
        "/healthz",
        "/metrics",
        "/gpu/peers",
        "/events",
        "/gpulock/release",
        "/gpulock/unload",
    }
    assert "http" not in json.dumps(schema["servers"])
