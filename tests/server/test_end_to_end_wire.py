"""What passes, what waits, and that bytes go through as they are: real processes and sockets."""

import http.client

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.fakes import Engines
from tests.fakes.faults import answer, cut_after
from tests.recordings import blur_workflow
from tests.server.client import background, call
from tests.server.jobs import CHAT, chat, hold_an_image, post_image
from tests.server.served import Served


def test_a_websocket_never_takes_the_lock(engines: Engines, served: Served) -> None:
    with connect(f"{served.comfy.replace('http', 'ws')}/ws?clientId=watcher") as socket:
        assert "watcher" in socket.recv(timeout=10)

        served.wait_state("idle")
        assert chat(served).status == 200
        assert post_image(served).status == 200
        served.wait_state("idle")


PASSING = [
    ("GET", "ollama", "/api/tags", None),
    ("GET", "ollama", "/api/ps", None),
    ("GET", "ollama", "/api/version", None),
    ("POST", "ollama", "/api/show", {"model": "llama3.2"}),
    ("POST", "ollama", "/api/pull", {"model": "llama3.2"}),
    ("GET", "ollama", "/v1/models", None),
    ("POST", "ollama", "/api/generate", {"model": "llama3.2", "keep_alive": 0}),
    ("POST", "ollama", "/api/chat", {"model": "llama3.2", "messages": [], "keep_alive": 0}),
    ("GET", "comfy", "/queue", None),
    ("GET", "comfy", "/history", None),
    ("GET", "comfy", "/prompt", None),
    ("GET", "comfy", "/api/system_stats", None),
    ("GET", "comfy", "/object_info/EmptyImage", None),
    ("GET", "comfy", "/view?filename=rec_00001_.png", None),
    ("POST", "comfy", "/queue", {"delete": ["none"]}),
    ("POST", "comfy", "/history", {"delete": ["none"]}),
]


def test_everything_that_needs_no_card_passes_an_image(engines: Engines, served: Served) -> None:
    nodes = hold_an_image(engines, served)

    for method, listener, path, body in PASSING:
        got = call(method, getattr(served, listener) + path, body)
        assert got.status == 200, (method, path, got)

    served.wait_state("image")
    nodes.open()


LOCKED = [
    ("ollama", "/api/generate", {"model": "llama3.2", "prompt": "hello"}),
    ("ollama", "/api/%63hat", CHAT),
    ("ollama", "/api/chat?x=1", CHAT),
    ("ollama", "/api/embed", {"model": "nomic-embed-text", "input": "one"}),
    ("ollama", "/api/embeddings", {"model": "nomic-embed-text", "prompt": "one"}),
    ("ollama", "/v1/chat/completions", CHAT),
    ("ollama", "/v1/completions", {"model": "llama3.2", "prompt": "hello"}),
    ("ollama", "/v1/embeddings", {"model": "nomic-embed-text", "input": "one"}),
    ("ollama", "/v1/not-yet-known", {"model": "llama3.2"}),
    ("comfy", "/api/prompt", blur_workflow(color=7)),
    ("comfy", "/api/%70rompt", blur_workflow(color=8)),
]


def test_everything_that_needs_the_card_waits_for_an_image(
    engines: Engines, served: Served
) -> None:
    nodes = hold_an_image(engines, served)
    engines.record.clear()

    futures = [
        background(lambda listener=listener, path=path, body=body: call(
            "POST", getattr(served, listener) + path, body
        ))
        for listener, path, body in LOCKED
    ]  # fmt: skip
    served.wait_waiting("llm", 9)
    served.wait_waiting("image", 2)
    assert [name for name in engines.record.names() if name.startswith("POST")] == []
    nodes.open()

    statuses = [future.result().status for future in futures]
    assert statuses == [404 if "not-yet" in path else 200 for _, path, _ in LOCKED]
    served.wait_state("idle", llm_inflight=0, image_pending=False)
    assert engines.oracle.computing_overlaps == []


def test_paths_headers_and_bodies_go_through_as_they_are(engines: Engines, served: Served) -> None:
    path = "/v1/models/qwen3%3A8b?a=%2F&b=1+2&&c"

    got = call("GET", served.ollama + path, headers={"X-Odd": "a  b", "Accept": "x/y"})

    direct = call("GET", engines.ollama.url + path)
    assert (got.status, got.body) == (direct.status, direct.body)
    through, _ = engines.record.calls()[-2:]
    assert through.raw_path == path
    assert through.header("X-Odd") == ["a  b"]
    assert through.header("Accept") == ["x/y"]


def test_a_locked_body_arrives_as_it_was_sent(engines: Engines, served: Served) -> None:
    raw = b'{ "messages" :[{"role":"user","content":"\xc3\xa9"}],  "model":"llama3.2"}'

    assert call("POST", f"{served.ollama}/api/chat", raw).status == 200

    assert engines.record.calls("POST /api/chat")[0].body == raw


def test_a_browser_of_the_proxy_passes_the_origin_rules(engines: Engines, served: Served) -> None:
    for url in (f"{served.ollama}/api/version", f"{served.comfy}/queue"):
        own = {"Origin": url.rsplit("/", 1)[0].removesuffix("/api")}
        foreign = {"Origin": "https://chat.example.org"}
        local = {"Host": "gpu.local", "Origin": "https://gpu.local"}

        assert call("GET", url, headers=own).status == 200, url
        assert call("GET", url, headers=foreign).status == 403, url
        assert call("GET", url, headers=local).status == 200, url


def test_a_name_that_somebody_pointed_at_us_meets_ollama_s_own_refusal(served: Served) -> None:
    rebound = {"Host": "evil.example.org", "Origin": "http://evil.example.org"}

    assert call("GET", f"{served.ollama}/api/version", headers=rebound).status == 403


def test_a_page_of_another_site_gets_no_websocket(served: Served) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{served.comfy.replace('http', 'ws')}/ws", origin="https://evil.example.org")

    assert refused.value.response.status_code == 403


def test_an_upload_passes_and_can_be_viewed(served: Served) -> None:
    parts = (
        b"--cut",
        b'Content-Disposition: form-data; name="image"; filename="big.png"',
        b"Content-Type: image/png",
        b"",
        picture := bytes(range(256)) * 4096,
        b"--cut--",
        b"",
    )
    kind = {"Content-Type": "multipart/form-data; boundary=cut"}

    sent = call("POST", f"{served.comfy}/upload/image", b"\r\n".join(parts), kind)

    assert (sent.status, sent.json()["name"]) == (200, "big.png")
    assert call("GET", f"{served.comfy}/view?filename=big.png").body == picture


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
def test_a_front_proxy_is_told_not_to_buffer_streams(
    engines: Engines, served: Served, path: str
) -> None:
    got = call("POST", served.ollama + path, {**CHAT, "stream": True})

    assert got.header("X-Accel-Buffering") == "no"
    direct = call("POST", engines.ollama.url + path, {**CHAT, "stream": True})
    assert got.header("Content-Type") == direct.header("Content-Type")
    assert got.body.count(b"\n") == direct.body.count(b"\n")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", ["/api/tags", "/api/chat"])
def test_an_answer_that_breaks_off_stays_broken(
    engines: Engines, served: Served, path: str, chunked: bool
) -> None:
    engines.ollama.fail("*", cut_after(100, chunked=chunked))
    method, body = ("GET", None) if path == "/api/tags" else ("POST", CHAT)

    with pytest.raises(http.client.IncompleteRead):
        call(method, served.ollama + path, body)

    served.wait_state("idle", llm_inflight=0)


def test_the_upstream_s_own_refusal_passes_unchanged(engines: Engines, served: Served) -> None:
    busy = b'{"error":"server busy, please try again.  maximum pending requests exceeded"}'
    engines.ollama.fail("POST /api/chat", answer(503, busy, **{"X-Own": "1"}))

    got = chat(served)

    assert (got.status, got.body, got.header("X-Own")) == (503, busy, "1")


def test_an_upstream_that_is_down_is_a_502_at_once(engines: Engines, served: Served) -> None:
    engines.kill(engines.ollama)
    engines.kill(engines.comfy)

    for listener, method, path, body in (
        ("ollama", "GET", "/api/tags", None),
        ("ollama", "POST", "/api/chat", CHAT),
        ("comfy", "GET", "/queue", None),
        ("comfy", "POST", "/prompt", blur_workflow()),
    ):
        assert call(method, getattr(served, listener) + path, body).status == 502, path

    served.wait_state("idle", llm_inflight=0, image_pending=False)
