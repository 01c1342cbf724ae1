"""What must hold for every input of the parts that only compute. Each target takes raw bytes.

Oracles are written anew here from the manuals of Go, Ollama and ComfyUI, on other libraries than
the code under test.
"""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from ocgpu.errors import ConfigError
from ocgpu.server.arbiter import Kind
from ocgpu.server.engines import comfyui, ollama
from ocgpu.server.engines.comfy_documents import JobResult, read_history, read_jobs, read_queue
from ocgpu.server.engines.ollama import Ollama
from ocgpu.server.guard import host_names, is_foreign_page, malformed
from ocgpu.server.relay.address import Address
from ocgpu.server.relay.control import Control, Reply, json_object
from ocgpu.server.relay.headers import forwarded, legal, request_headers, response_headers
from ocgpu.server.relay.upstream import UpstreamError
from ocgpu.server.routes import lookup
from ocgpu.settings import VARIABLES, describe, load_settings

__all__ = ["TARGETS"]

Pairs = list[tuple[bytes, bytes]]

OLLAMA_INFERENCE: Final = frozenset(
    (
        b"/api/generate",
        b"/api/chat",
        b"/api/embed",
        b"/api/embeddings",
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/embeddings",
        b"/v1/responses",
        b"/v1/messages",
        b"/v1/audio/transcriptions",
        b"/v1/systemone",
        b"/v1/images/generations",
        b"/v1/images/edits",
    )
)
COMFY_INFERENCE: Final = frozenset((b"/prompt", b"/api/prompt"))
HOP: Final = frozenset(
    (
        b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
        b"transfer-encoding upgrade"
    ).split()
)
TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32768}")
VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
SECRET: Final = "sEcReT7"  # noqa: S105 - of these tests
SCOPE: Final = {"client": ("192.0.2.7", "1"), "scheme": "http"}


class _Said(Control):
    """Answers every call with one body."""

    def __init__(self, body: bytes) -> None:
        self.upstream = type("Upstream", (), {"url": "http://u", "authority": b"u"})()
        self._body = body

    async def get(self, path: str, *, timeout: float) -> Reply:
        del path, timeout
        return Reply(200, [], self._body)


def routes(data: bytes) -> None:
    """What an engine takes for work, once it has decoded the path, takes the lock."""
    method, _, target = data.partition(b" ")
    raw = target.partition(b"?")[0]
    decoded = unquote_to_bytes(raw)
    try:
        # As our listener does; a path that is no UTF-8 is answered by it with a 400.
        path, verb = decoded.decode(), method.decode("ascii")
    except UnicodeDecodeError:
        return
    of_ollama = lookup(ollama.ROUTES, verb, path)
    of_comfy = lookup(comfyui.ROUTES, verb, path)
    if verb.upper() != "POST":
        assert of_ollama is None
        assert of_comfy is None
        return
    assert (of_comfy is Kind.IMAGE) == (decoded in COMFY_INFERENCE)
    if decoded in OLLAMA_INFERENCE:
        assert of_ollama is Kind.LLM
    if of_ollama is None and path.startswith(("/api/", "/v1/")):
        assert path.startswith("/api/blobs/") or ollama.ROUTES.exact[path] is None


def commands(data: bytes) -> None:
    """A request that passes without the lock starts no work, as Go reads its body."""
    path, _, body = data.partition(b"\n")
    name = path.decode("latin-1")
    if Ollama(_Said(b"")).needs_lock(Kind.LLM, name, body):
        return
    fields = _as_go(body)
    model = fields.get("model")
    if isinstance(model, str) and re.search(r"(:|-)cloud\Z", model.rpartition("/")[2]):
        return
    assert name in {"/api/generate", "/api/chat"}
    assert _go_seconds(fields.get("keep_alive")) == 0
    assert not fields.get("prompt" if name == "/api/generate" else "messages")


def _as_go(body: bytes) -> dict[str, Any]:
    """Read an object as encoding/json does: letter case aside, a null leaves a string as it was."""
    fields: dict[str, Any] = {}
    text = body.decode("utf-8", "replace")
    for key, value in json.loads(text, object_pairs_hook=list):
        folded = key.casefold()
        if value is None and isinstance(fields.get(folded), str):
            continue
        fields[folded] = value
    return fields


def _go_seconds(value: object) -> float | None:
    """Give a `keep_alive` in seconds, None for the default, -1 for what Go would refuse."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return -1
    if not isinstance(value, str):
        return float(value)
    number = re.fullmatch(r"[+-]?([0-9.]+(ns|us|µs|ms|s|m|h))+|[+-]?0+", value)
    return 0 if number and not re.search("[1-9]", value) else -1


def headers(data: bytes) -> None:
    """Hop-by-hop headers stay here, what routes and frames goes on, what is legal stays legal."""
    given = _pairs(data)
    low = [(name.lower(), value) for name, value in given]
    named = {
        word.strip().lower()
        for name, value in low
        if name == b"connection"
        for word in value.split(b",")
    }
    kept = {b"host", b"content-length", b"content-type", b"authorization"}
    wanted = [h for h in low if h[0] not in HOP and (h[0] not in named or h[0] in kept)]

    lengths = [at for at, h in enumerate(wanted) if h[0] == b"content-length"]
    once = [h for at, h in enumerate(wanted) if at not in lengths[1:]]
    assert request_headers(low) == [h for h in once if h[0] != b"expect"]
    out = response_headers(given)
    assert [h for h in out if h != (b"x-accel-buffering", b"no") or h in low] == wanted
    assert legal(given) == all(
        TOKEN.fullmatch(name) is not None and VALUE.fullmatch(value) is not None
        for name, value in given
    )
    assert not legal(given) or legal(out)
    assert response_headers(out) == out
    _check_forwarded(request_headers(low))
    scope = {"headers": low, "method": "GET", "http_version": "1.1"}
    if malformed(scope) is None:
        assert [name for name, _ in low].count(b"host") == 1
    elif is_foreign_page([h for h in low if h[0] != b"accept-language"], host_names(())):
        assert is_foreign_page([*low, (b"accept-language", b"*")], host_names(()))


def _check_forwarded(given: Pairs) -> None:
    out = forwarded(given, dict(SCOPE))
    chains = [value for name, value in out if name == b"x-forwarded-for"]
    assert len(chains) == 1
    assert chains[0].endswith(b"192.0.2.7")
    ours = {b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host"}
    assert [h for h in out if h[0] not in ours] == [h for h in given if h[0] not in ours]
    assert {h[0] for h in out} >= {b"x-forwarded-proto"}


def _pairs(data: bytes) -> Pairs:
    """Give headers of lines `name: value`, as nasty as they come."""
    parts = (line.partition(b":") for line in data.split(b"\n"))
    return [(name, value.strip(b" ")) for name, _, value in parts]


def documents(data: bytes) -> None:
    """Whatever an engine says: a value of the right type, or an error of the upstream."""
    found = json_object(data)
    assert found is None or isinstance(found, dict)
    for read in (read_queue, read_jobs):
        queue = read(data)
        assert queue is None or all(isinstance(item, str) for item in queue.ids)
    history = read_history(data)
    assert history is None or all(isinstance(ending, JobResult) for ending in history.values())
    said = _Said(data)
    for call in (
        lambda: Ollama(said).loaded(timeout=1),
        lambda: Ollama(said).probe(),
        lambda: comfyui.ComfyUI(said).probe(),
        lambda: comfyui.ComfyUI(said).queue(),
    ):
        _run(call)


def _run(call: Callable[[], Any]) -> None:
    try:
        answer = asyncio.run(call())
    except UpstreamError:
        return
    parts = [answer] if isinstance(answer, str) else list(answer)
    for part in parts:
        assert isinstance(part, str) or all(isinstance(text, str) for text in part)


def settings(data: bytes) -> None:
    """Settings are read, or refused by name; a secret stands in no message and no listing."""
    names = {variable.name for variable in VARIABLES}
    given = data.decode("utf-8", "replace").replace(SECRET, "")
    lines = (line.partition("=") for line in given.split("\n"))
    environ = {name: text for name, _, text in lines if name in names and "\0" not in text}
    for name in ("OLLAMA_URL", "COMFY_URL"):
        login, at, host = environ.get(name, "").rpartition("@")
        environ[name] = f"{login}{SECRET}@{host}" if at else host
    environ["ADMIN_TOKEN"] = SECRET
    try:
        read = load_settings(environ)
    except ConfigError as error:
        told = str(error)
        assert all(line.split(" ")[0] in {"invalid", "unknown"} for line in told.split("\n"))
    else:
        told = f"{read!r} {list(describe(read))}"
        for url in (read.ollama_url, read.comfy_url):
            if url:
                assert Address.parse(url).port > 0
    assert SECRET not in told


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    target.__name__: target for target in (routes, commands, headers, documents, settings)
}
