"""Our own endpoints: health, metrics, peers, props, and the control plane."""

import asyncio
import os

import pytest

import ocgpu
from tests.server.inloop import Connection, RawUpstream, exchange, proxy
from tests.server.requests import CHAT, Engine, get, json_of, post, status_of, waiting

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")


async def test_health_is_answered_on_every_listener_for_get_and_head() -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url, raw.url) as bound:
        for url in (bound.ollama_url, bound.comfy_url, bound.admin_url):
            answer = await exchange(url, get("/healthz"))
            assert status_of(answer) == 200
            document = json_of(answer)
            assert document["state"] == "idle"
            assert document["llm_inflight"] == 0
            assert document["image_pending"] is False
            assert document["lease"] == {
                "enabled": True,
                "mode": None,
                "held_seconds": None,
                "waiting": False,
                "wanted": False,
            }
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
        "memory_bytes": None,
    }
    assert document["outside"] == {"processes": None, "image_jobs": None}


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
        assert "gpulease_held 0\n" in text
        assert (document["lease"]["held"], document["self"]["lease"]) == (False, None)
        with ocgpu.Lease(gpu_key):
            text = (await exchange(bound.admin_url, get("/metrics"))).decode()
            document = json_of(await exchange(bound.ollama_url, get("/gpu/peers")))
        assert "gpulease_held 1\n" in text
        assert [party["pid"] for party in document["lease"]["holders"]] == [os.getpid()]
        assert document["self"]["lease"] == "exclusive"
        assert "gpulease_waiters 0\n" in text

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

    async def engine(connection: Connection) -> None:
        head = await connection.head()
        calls.append(head[0].rpartition(b" ")[0])
        body = b"{}"
        if b"/api/ps" in head[0]:
            gone = b"POST /api/generate" in calls
            body = b'{"models":[]}' if gone else b'{"models":[{"name":"m"}]}'
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


async def test_engines_on_another_host_are_no_peer_and_take_no_lease(gpu_key: str) -> None:
    # An address of the documentation's network, where nobody is.
    elsewhere = "http://192.0.2.1:11434"
    async with proxy(elsewhere, gpu_key=gpu_key, connect_timeout=0.1) as bound:
        health = json_of(await exchange(bound.ollama_url, get("/healthz")))
        peers = json_of(await exchange(bound.ollama_url, get("/gpu/peers")))

        off = {"enabled": False, "reason": "the engines are on another host"}
        assert health["lease"] == health["registry"] == off
        assert (peers["enabled"], peers["self"]) == (False, None)
        assert ocgpu.peers(gpu_key).peers == []
