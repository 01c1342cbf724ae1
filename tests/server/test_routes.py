"""Which requests take the lock, and with which Host and Origin they go on."""

import json
import socket

import pytest

from ocgpu.server.arbiter import Kind
from ocgpu.server.engines import comfyui
from ocgpu.server.engines.comfyui import ComfyUI
from ocgpu.server.engines.ollama import ROUTES, Ollama
from ocgpu.server.relay.control import Control
from ocgpu.server.routes import lookup


class NoUpstream:
    """Stands for an upstream that is never called."""

    url = "http://127.0.0.1:11434"
    authority = b"127.0.0.1:11434"


@pytest.fixture
def ollama() -> Ollama:
    return Ollama(Control(NoUpstream()))


@pytest.mark.parametrize(
    "path",
    [
        "/api/generate",
        "/api/chat",
        "/api/embed",
        "/api/embeddings",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/audio/transcriptions",
        "/v1/systemone",
        "/api/something-new",
        "/api/chat/",
    ],
)
def test_inference_posts_and_unknown_ones_take_the_llm_lock(path: str) -> None:
    assert lookup(ROUTES, "POST", path) is Kind.LLM
    assert lookup(ROUTES, "post", path) is Kind.LLM


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/tags"),
        ("GET", "/api/chat"),
        ("HEAD", "/"),
        ("DELETE", "/api/delete"),
        ("OPTIONS", "/v1/chat/completions"),
        ("POST", "/api/show"),
        ("POST", "/api/pull"),
        ("POST", "/api/push"),
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/blobs/sha256:29fd"),
        ("POST", "/api/me"),
        ("POST", "/completion"),
    ],
)
def test_requests_that_use_no_gpu_pass(method: str, path: str) -> None:
    assert lookup(ROUTES, method, path) is None


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("POST", "/prompt", Kind.IMAGE),
        ("POST", "/api/prompt", Kind.IMAGE),
        ("GET", "/prompt", None),
        ("POST", "/prompt/", None),
        ("POST", "//prompt", None),
        ("POST", "/API/prompt", None),
        ("POST", "/api/api/prompt", None),
        ("POST", "/free", None),
        ("POST", "/queue", None),
        ("POST", "/interrupt", None),
        ("POST", "/upload/image", None),
    ],
)
def test_comfyui_locks_the_two_names_of_prompt_alone(
    method: str, path: str, kind: Kind | None
) -> None:
    assert lookup(comfyui.ROUTES, method, path) is kind


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"model": "m", "keep_alive": 0}),
        ("/api/generate", {"model": "m", "keep_alive": 0, "prompt": ""}),
        ("/api/generate", {"model": "m", "keep_alive": "0"}),
        ("/api/generate", {"model": "m", "keep_alive": "0s"}),
        ("/api/generate", {"model": "m", "keep_alive": 0.0}),
        ("/api/chat", {"model": "m", "keep_alive": 0}),
        ("/api/chat", {"model": "m", "keep_alive": 0, "messages": []}),
        ("/api/chat", {"model": "m", "keep_alive": "0m0s", "messages": None}),
        ("/api/chat", {"model": "gpt-oss:120b-cloud", "messages": [{"role": "user"}]}),
        ("/v1/chat/completions", {"model": "kimi-k2:cloud", "messages": [{"role": "user"}]}),
        ("/v1/responses", {"model": "org/kimi-k2:1t-cloud", "input": "x"}),
    ],
)
def test_unload_commands_and_cloud_models_pass(ollama: Ollama, path: str, body: dict) -> None:
    assert not ollama.needs_lock(Kind.LLM, path, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", b'{"model":"m"}'),
        ("/api/generate", b'{"model":"m","prompt":"x","keep_alive":0}'),
        ("/api/generate", b'{"model":"m","keep_alive":5}'),
        ("/api/generate", b'{"model":"m","keep_alive":"10m"}'),
        ("/api/generate", b'{"model":"m","keep_alive":-1}'),
        ("/api/generate", b'{"model":"m","keep_alive":false}'),
        ("/api/chat", b'{"model":"m","keep_alive":0,"messages":[{"role":"user"}]}'),
        ("/api/embed", b'{"model":"m","keep_alive":0}'),
        ("/v1/completions", b'{"model":"m","keep_alive":0}'),
        ("/api/chat", b'{"model":"cloud","messages":[]}'),
        ("/api/chat", b'{"model":"my-cloud:7b","messages":[]}'),
        ("/api/generate", b'{"model":"m","prompt":" ","keep_alive":0}'),
        ("/api/generate", b'{"model":"m","prompt":"","Prompt":"hi","keep_alive":0}'),
        ("/api/generate", b'{"model":"m","PROMPT":"hi","keep_alive":0}'),
        ("/api/generate", b'{"model":"m","prompt":"hi","prompt":null,"keep_alive":0}'),
        ("/api/chat", b'{"model":"m:cloud","Model":"m","messages":[1]}'),
        ("/api/chat", b'{"Model":"m","model":"m:cloud"}'),
        pytest.param("/api/chat", b'{"model":' + b"[" * 100_000, id="deep nesting"),
        ("/api/chat", b"no json"),
        ("/api/chat", b""),
        ("/api/chat", b"[1]"),
        ("/api/chat", b"\xff\xfe"),
        ("/v1/audio/transcriptions", b"--boundary\r\n"),
    ],
)
def test_everything_else_takes_the_lock(ollama: Ollama, path: str, body: bytes) -> None:
    assert ollama.needs_lock(Kind.LLM, path, body)


def test_ollama_gets_its_own_host(ollama: Ollama) -> None:
    headers = ollama.headers([(b"host", b"ai.example.com"), (b"accept", b"*/*")])

    assert headers == [(b"host", b"127.0.0.1:11434"), (b"accept", b"*/*")]


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:11435",
        "192.168.1.5",
        "8.8.8.8:80",
        "[::1]:11435",
        "[fe80::1]",
        "localhost:11435",
        "LocalHost",
        "a.b.localhost",
        "box.local:11435",
        "ollama.internal.",
        socket.gethostname(),
        "ai.example.com",
        "AI.Example.com:443",
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_origin_that_is_our_own_listener_is_removed_for_ollama(host: str, scheme: str) -> None:
    ours = Ollama(Control(NoUpstream()), ("ai.example.com",))
    origin = (b"origin", f"{scheme}://{host}".encode())

    assert origin not in ours.headers([(b"host", host.encode()), origin])


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:11435",
        "localhost.evil.example",
        "xlocalhost",
        "evillocal",
        "1.2.3.4.evil.example",
        "1.2.3",
        "ai.example.com.evil",
        "[evil]",
        "",
        "\xff",
    ],
)
def test_a_name_that_was_pointed_at_us_keeps_its_origin(host: str) -> None:
    ours = Ollama(Control(NoUpstream()), ("ai.example.com",))
    origin = (b"origin", b"http://" + host.encode("latin-1"))

    assert origin in ours.headers([(b"host", host.encode("latin-1")), origin])


@pytest.mark.parametrize(
    "origin", [b"http://evil.example", b"null", b"http://ai.example.com:8080", b"tauri://x"]
)
def test_any_other_origin_reaches_ollama_as_it_is(origin: bytes) -> None:
    ours = Ollama(Control(NoUpstream()), ("ai.example.com",))

    headers = ours.headers([(b"host", b"ai.example.com"), (b"origin", origin)])

    assert (b"origin", origin) in headers


def test_comfyui_gets_the_clients_host_and_origin() -> None:
    headers = [(b"host", b"comfy.example.com"), (b"origin", b"https://comfy.example.com")]

    assert ComfyUI(Control(NoUpstream())).headers(headers) == headers
