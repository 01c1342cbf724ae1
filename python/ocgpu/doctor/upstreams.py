"""Ollama and ComfyUI behind the proxy: do they answer, as what they should be, and let us in?"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from ocgpu.doctor.finding import Finding, error, ok, warning
from ocgpu.doctor.web import Answer, AskError, ask
from ocgpu.server.relay.address import Address

if TYPE_CHECKING:
    from ocgpu.settings import Listen

__all__ = ["check_comfy", "check_ollama", "is_serve"]

_OK: Final = 200
_UNAUTHORIZED: Final = 401
_FORBIDDEN: Final = 403
_REDIRECTS: Final = range(300, 400)
_SERVER_FAULTS: Final = range(500, 600)
_PLAIN_TO_TLS: Final = (400, 426, 497)


class _Kind(NamedTuple):
    """One kind of engine.

    Attributes:
        path: What only it answers.
        version: Its version out of that answer's document, None when it is none of this kind.
        let_in: How its owner opens it for a Host that it refuses.
    """

    name: str
    title: str
    variable: str
    path: str
    version: Callable[[Answer], str | None]
    let_in: str


def _ollama_version(answer: Answer) -> str | None:
    version = answer.document().get("version")
    return version if isinstance(version, str) else None


def _comfy_version(answer: Answer) -> str | None:
    system = answer.document().get("system")
    if not isinstance(system, dict) or "devices" not in answer.document():
        return None
    return str(system.get("comfyui_version", "of unknown version"))


_OLLAMA: Final = _Kind(
    "ollama",
    "Ollama",
    "OLLAMA_URL",
    "/api/version",
    _ollama_version,
    "name it by its address in `OLLAMA_URL`, or start Ollama with `OLLAMA_HOST=0.0.0.0`",
)
_COMFY: Final = _Kind(
    "comfyui",
    "ComfyUI",
    "COMFY_URL",
    "/system_stats",
    _comfy_version,
    "let the server in front of ComfyUI pass every Host",
)


def check_ollama(url: str, *, needed: bool = True) -> list[Finding]:
    """Look at the Ollama of a URL.

    Args:
        url: Where; "" is none.
        needed: Whether somebody set the URL or runs a serve: then it must be there.
    """
    if not url:
        return [ok(_OLLAMA.name, "off: OLLAMA_URL is empty")]
    address = Address.parse(url)
    finding = _identify(_OLLAMA, address, needed=needed)
    if finding.status == "ok" and _refused(address, _OLLAMA, {"Origin": "http://localhost"}):
        found = f"{finding.found}, answers 403 to a page of http://localhost (Origin)"
        return [warning(_OLLAMA.name, found, "see `OLLAMA_ORIGINS` where Ollama is started")]
    return [finding]


def check_comfy(url: str, listen: "Listen | None", *, needed: bool = True) -> list[Finding]:
    """Look at the ComfyUI of a URL.

    Args:
        url: Where; "" is none.
        listen: Our listener in front of it, whose name a browser sends as Host and Origin.
        needed: As for `check_ollama`.
    """
    if not url:
        return [ok(_COMFY.name, "off: COMFY_URL is empty")]
    address = Address.parse(url)
    finding = _identify(_COMFY, address, needed=needed)
    host = f"127.0.0.1:{listen.port}" if listen else address.authority.decode()
    page = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    if finding.status == "ok" and _refused(address, _COMFY, page):
        found = f"{finding.found}, answers 403 to a browser that comes through serve"
        remedy = f"let it pass Host and Origin `{host}`; see what stands in front of ComfyUI"
        return [error(_COMFY.name, found, remedy)]
    return [finding]


def _refused(address: Address, kind: _Kind, headers: dict[str, str]) -> bool:
    try:
        return ask(address, kind.path, headers).status == _FORBIDDEN
    except AskError:
        return False


def _identify(kind: _Kind, address: Address, *, needed: bool) -> Finding:
    try:
        answer = ask(address, kind.path)
        if is_serve(ask(address, "/healthz")):
            found = f"{address.url} is an `ocgpu serve`, not an engine"
            return error(kind.name, found, f"set `{kind.variable}` to the engine itself")
        return _judge(kind, address, answer)
    except AskError as problem:
        found = f"{address.url}: {problem.found}"
        if problem.refused and not needed:
            remedy = f"start it, or set `{kind.variable}`, before `ocgpu serve` is used"
            return warning(kind.name, f"{found}, and no serve runs that would need it", remedy)
        return error(kind.name, found, problem.remedy)


def is_serve(answer: Answer) -> bool:
    """Whether an answer to `/healthz` is that of an `ocgpu serve`."""
    return {"state", "llm_inflight", "image_pending"} <= answer.document().keys()


def _judge(kind: _Kind, address: Address, answer: Answer) -> Finding:
    """Judge the answer to the question that only this kind of engine answers."""
    status, where = answer.status, address.url
    if status == _OK:
        version = kind.version(answer)
        if version is not None:
            return ok(kind.name, f"{where} is {kind.title} {version}")
    if status == _UNAUTHORIZED:
        what = "asks for a login" if address.authorization is None else "refuses the URL's login"
        remedy = f"put `user:password@` into `{kind.variable}`, of one that may use it"
        return error(kind.name, f"{where} {what} (401)", remedy)
    if status == _FORBIDDEN:
        return _forbidden(kind, address)
    if status in _REDIRECTS:
        target = re.sub("//[^/]*@", "//…@", answer.location)
        found = f"{where} sends us elsewhere ({status}): {target}"
        return error(kind.name, found, f"set `{kind.variable}` to where it sends us")
    if status in _SERVER_FAULTS:
        found = f"{where} answers {status} to {kind.path}"
        return warning(kind.name, found, "see its log; a gateway says so while the engine is down")
    return _stranger(kind, address, status)


def _forbidden(kind: _Kind, address: Address) -> Finding:
    local = {"Host": f"localhost:{address.port}"}
    host = address.authority.decode()
    if ask(address, kind.path, local).status == _FORBIDDEN:
        return error(kind.name, f"{address.url} answers 403", "see its rules for who may ask")
    return error(kind.name, f"{address.url} answers 403 to the Host `{host}`", kind.let_in)


def _stranger(kind: _Kind, address: Address, status: int) -> Finding:
    """Say what it is, where it is not what it should be."""
    for other in (_OLLAMA, _COMFY):
        if other is not kind and other.version(ask(address, other.path)) is not None:
            found = f"{address.url} is {other.title}, not {kind.title}"
            remedy = f"set `{kind.variable}` to {kind.title}, and `{other.variable}` to this"
            return error(kind.name, found, remedy)
    if kind is _OLLAMA and isinstance(ask(address, "/v1/models").document().get("data"), list):
        found = f"{address.url} speaks OpenAI's API and is no Ollama: its model cannot be unloaded"
        return warning(kind.name, found, "put Ollama there where images share the GPU")
    found = f"{address.url} is no {kind.title}: it answers {status} to {kind.path}"
    hint = "; `https://` if it wants TLS" if not address.secure and status in _PLAIN_TO_TLS else ""
    return error(kind.name, found, f"set `{kind.variable}` to {kind.title} itself{hint}")
