"""Settings of `ocgpu serve`: one frozen struct, read once at start, refused whole if one is wrong.

Flags win over the environment, the environment over `ocgpu.toml`. An empty value counts as not
given, because that is what a compose file makes of an unset variable; only an upstream URL takes it
at its word: empty turns that listener off.

The library's own variables (`OCGPU_DIR`, `OCGPU_SHARE`, `OCGPU_SCHEDULE`) are no settings: the
library reads them from the environment when an object is made, without msgspec.
"""

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from ocgpu import forms
from ocgpu._ocgpu import GPU_KEY_FORM, SCHEDULE_FORM, WEIGHT_FORM, check_place, is_schedule
from ocgpu.contradictions import contradictions
from ocgpu.durations import DURATION_FORM, format_duration, parse_duration
from ocgpu.errors import ConfigError
from ocgpu.forms import Listen
from ocgpu.networks import NETWORKS_FORM, PRIVATE, Network, format_networks, networks
from ocgpu.text import printable

__all__ = [
    "VARIABLES",
    "Listen",
    "Settings",
    "Variable",
    "describe",
    "load_settings",
    "near_misses",
]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What `ocgpu serve` runs by. `VARIABLES` says how each field is spelt and what it means.

    Durations are seconds, sizes bytes. A listener is None when it is off. An upstream URL is ""
    when there is no such upstream; otherwise it may hold a login and a path, and ends in no slash.
    """

    listen_ollama: Listen | None = Listen(host="::", port=11435)
    listen_comfy: Listen | None = Listen(host="::", port=8189)
    listen_admin: Listen | None = Listen(host="127.0.0.1", port=8190)
    ollama_url: str = "http://127.0.0.1:11434"
    comfy_url: str = "http://127.0.0.1:8188"
    unload_timeout: float = 60.0
    job_timeout: float = 900.0
    job_timeout_action: Literal["release", "interrupt"] = "release"
    llm_wait_timeout: float = 600.0
    image_wait_timeout: float = 0.0
    image_batch: int = 8
    warm_model: str = ""
    lease: bool = True
    lease_wait_timeout: float = 60.0
    gpu_share_weight: float = 1.0
    gpu_key: str = ""
    max_queue: int = 1024
    max_waiting_bytes: int = 2**30
    settle_timeout: float = 5.0
    wait_keepalive: float = 0.0
    stall_timeout: float = 60.0
    connect_timeout: float = 5.0
    drain_timeout: float = 10.0
    trusted_proxies: tuple[Network, ...] = PRIVATE
    ollama_hosts: tuple[str, ...] = ()
    admin_hosts: tuple[str, ...] = ()
    admin_token: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    def __repr__(self) -> str:
        # Token and logins must not reach a log by way of a struct that somebody prints.
        return f"Settings({', '.join(f'{name}={text}' for name, text in describe(self))})"


class Variable(NamedTuple):
    """One setting: its name in the environment, how its text is read, what to say about it.

    Attributes:
        parse: Text to value; raises ValueError outside the legal form.
        legal: The legal form, as it completes "use …".
        meaning: One phrase for the settings table.
        empty: An empty text is a value, not the same as none.
        show: Value to text, as a person would write it; what is secret is masked.
    """

    name: str
    parse: Callable[[str], Any]
    legal: str
    meaning: str
    empty: bool = False
    show: Callable[[Any], str] = str

    @property
    def field(self) -> str:
        """Name of the field in `Settings`."""
        return self.name.removeprefix("OCGPU_").lower()


def _listen(name: str, meaning: str) -> Variable:
    return Variable(
        name, forms.listen, forms.LISTEN_FORM, meaning, show=lambda v: str(v) if v else "off"
    )


def _url(name: str, meaning: str) -> Variable:
    return Variable(name, forms.url, forms.URL_FORM, meaning, empty=True, show=forms.masked)


def _hosts(name: str, meaning: str) -> Variable:
    return Variable(name, forms.hosts, forms.HOSTS_FORM, meaning, show=",".join)


def _positive(name: str, meaning: str) -> Variable:
    return Variable(
        name, forms.positive_duration, forms.POSITIVE_FORM, meaning, show=format_duration
    )


def _duration(name: str, meaning: str) -> Variable:
    return Variable(name, parse_duration, DURATION_FORM, meaning, show=format_duration)


def _count(name: str, minimum: int, meaning: str) -> Variable:
    return Variable(name, forms.integer(minimum), f"a whole number from {minimum} on", meaning)


def _choice(name: str, meaning: str, *words: str) -> Variable:
    legal = " or ".join(f"`{word}`" for word in words)
    return Variable(name, forms.choice({word: word for word in words}), legal, meaning)


_SWITCH_WORDS: Final = ("on", "off", "true", "false", "yes", "no", "1", "0")
_LEVEL_WORDS: Final = ("debug", "info", "warning", "error")
_SWITCH: Final = {word: word in {"on", "true", "yes", "1"} for word in _SWITCH_WORDS}
_LEVELS: Final = {"warn": "warning"} | {word: word for word in _LEVEL_WORDS}
_VISIBLE: Final = r"[!-~]{1,256}"
_MASK: Final = "***"

VARIABLES: Final = (
    _listen("LISTEN_OLLAMA", "listener for the clients of Ollama"),
    _listen("LISTEN_COMFY", "listener for the clients of ComfyUI"),
    _listen("LISTEN_ADMIN", "listener of the control plane"),
    _url("OLLAMA_URL", "Ollama itself; empty turns its listener off"),
    _url("COMFY_URL", "ComfyUI itself; empty turns its listener off"),
    _positive("UNLOAD_TIMEOUT", "wait for Ollama to unload before an image job"),
    _positive("JOB_TIMEOUT", "longest image job"),
    _choice(
        "JOB_TIMEOUT_ACTION",
        "at `JOB_TIMEOUT`, give up the lock alone, or interrupt the job as well",
        "release",
        "interrupt",
    ),
    _duration("LLM_WAIT_TIMEOUT", "longest wait of an LLM request, then 503; 0 is no limit"),
    _duration("IMAGE_WAIT_TIMEOUT", "longest wait of an image job, then 503; 0 is no limit"),
    _count("IMAGE_BATCH", 0, "image jobs in a row while a chat waits; 0 frees after every job"),
    Variable(
        "WARM_MODEL", forms.matching(_VISIBLE), "a model name", "model to load after an image"
    ),
    Variable(
        "LEASE",
        forms.choice(_SWITCH),
        "`on` or `off`",
        "take part in the machine's GPU lease",
        show=lambda value: "on" if value else "off",
    ),
    _duration("LEASE_WAIT_TIMEOUT", "wait for an outside holder of the lease, then 503"),
    Variable("GPU_SHARE_WEIGHT", forms.weight, WEIGHT_FORM, "weight among the peers on the GPU"),
    Variable(
        "OCGPU_GPU_KEY",
        forms.gpu_key,
        GPU_KEY_FORM,
        "name of the GPU; empty asks the driver",
    ),
    _count("MAX_QUEUE", 1, "requests that may wait, then 503"),
    Variable(
        "MAX_WAITING_BYTES",
        forms.byte_count,
        forms.BYTES_FORM,
        "memory for the bodies of requests that need the lock, then 503",
        show=forms.format_bytes,
    ),
    _duration("SETTLE_TIMEOUT", "wait until freed GPU memory is seen to be free"),
    _duration("WAIT_KEEPALIVE", "interval of signs of life to a stream that waits; 0 is off"),
    _duration("STALL_TIMEOUT", "a client that takes no byte for so long is gone; 0 is never"),
    _positive("CONNECT_TIMEOUT", "wait for an upstream to take a connection"),
    _duration("DRAIN_TIMEOUT", "time for running requests to end at shutdown, then they are cut"),
    Variable(
        "TRUSTED_PROXIES",
        networks,
        NETWORKS_FORM,
        "peers whose `X-Forwarded-*` is believed and extended; that of others is replaced",
        show=format_networks,
    ),
    _hosts("OLLAMA_HOSTS", "names under which web pages may count as Ollama's own"),
    _hosts(
        "ADMIN_HOSTS", "names that the control plane answers to, besides addresses and `localhost`"
    ),
    Variable(
        "ADMIN_TOKEN",
        forms.matching(_VISIBLE),
        "1 to 256 visible ASCII characters",
        "bearer token of the control plane; required unless `LISTEN_ADMIN` is on loopback",
        show=lambda value: value and _MASK,
    ),
    Variable(
        "LOG_LEVEL",
        forms.choice(_LEVELS),
        "`debug`, `info`, `warning` or `error`",
        "least level that is logged",
    ),
    _choice("LOG_FORMAT", "form of a log line", "text", "json"),
)
_BY_NAME: Final = {variable.name: variable for variable in VARIABLES}
# Files and flags may say a field's name as well: `gpu_key` for OCGPU_GPU_KEY.
_BY_KEY: Final = _BY_NAME | {variable.field.upper(): variable for variable in VARIABLES}
# A variable of Ollama's own, one letter away from one of ours.
_FOREIGN: Final = frozenset(("OLLAMA_HOST",))


class _Text(NamedTuple):
    """What somebody wrote for a setting, and where, as it ends a message."""

    text: str
    source: str


def load_settings(
    environ: Mapping[str, str],
    *,
    config: Path | None = None,
    overrides: Mapping[str, str] | None = None,
) -> Settings:
    """Read all settings, or refuse them all.

    Args:
        environ: The environment; names are matched exactly, others are ignored.
        config: An `ocgpu.toml` with the same names in lower or upper case.
        overrides: What flags said, by environment name or field name.

    Raises:
        ConfigError: One line for each thing that is wrong: variable, value, legal form.
    """
    problems: list[str] = []
    texts: dict[str, _Text] = {}
    if config is not None:
        _take(texts, _read_file(config, problems), f", in `{config}`")
    _take(texts, {name: environ[name] for name in _BY_NAME if name in environ}, "")
    _take(texts, {_BY_KEY[key.upper()].name: text for key, text in (overrides or {}).items()}, "")
    values: dict[str, Any] = {}
    for name, (text, source) in texts.items():
        variable = _BY_NAME[name]
        try:
            values[variable.field] = variable.parse(text)
        except ValueError:
            problems.append(f"{_invalid(name, text)}; use {variable.legal}{source}")
    problems += _library_problems(environ)
    settings = _without_idle_listeners(Settings(**values))
    problems += [] if problems else _contradictions(settings)
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def _library_problems(environ: Mapping[str, str]) -> list[str]:
    """What is wrong with the variables that the library reads by itself when serve joins."""
    problems = []
    schedule = environ.get("OCGPU_SCHEDULE")
    if schedule and not is_schedule(schedule):
        problems.append(f"{_invalid('OCGPU_SCHEDULE', schedule)}; use {SCHEDULE_FORM}")
    for values in ((environ.get("OCGPU_DIR"), None), (None, environ.get("OCGPU_SHARE"))):
        try:
            check_place(*values)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def _take(texts: dict[str, _Text], given: Mapping[str, str], source: str) -> None:
    """Lay `given` over `texts`; an empty text counts only where it is a value."""
    for name, text in given.items():
        if text.strip() or _BY_NAME[name].empty:
            texts[name] = _Text(text.strip(), source)


def _read_file(path: Path, problems: list[str]) -> dict[str, str]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problems.append(f"invalid `--config`: {path}; use a readable TOML file: {reason}")
        return {}
    texts: dict[str, str] = {}
    for key, value in document.items():
        variable = _BY_KEY.get(key.upper())
        if variable is None:
            problems.append(f"unknown `{printable(key)}`: {_nearest(key)}, in `{path}`")
        elif variable.name in texts:
            problems.append(f"invalid `{key}`: given twice; use it once, in `{path}`")
        elif isinstance(value, str | int | float):
            texts[variable.name] = str(value).lower() if isinstance(value, bool) else str(value)
        else:
            problems.append(
                f"invalid `{key}`: not one value; use {variable.legal} in quotes, in `{path}`"
            )
    return texts


def _nearest(key: str) -> str:
    if key.upper() in {"OCGPU_DIR", "OCGPU_SHARE", "OCGPU_SCHEDULE"}:
        return "the library reads it from the environment; set it there"
    close = difflib.get_close_matches(key.upper(), _BY_KEY, n=1)
    name = close[0].lower() if close else "a name of the settings table"
    return f"no setting has this name; use `{name}`" if close else f"use {name}"


def near_misses(environ: Mapping[str, str]) -> list[str]:
    """Name variables that look like a misspelt setting, one message each: warnings, not errors."""
    messages = []
    for name in sorted(environ.keys() - _BY_NAME.keys() - _FOREIGN):
        close = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.88)
        if close:
            messages.append(
                f"unknown `{printable(name)}`: no setting has this name; use `{close[0]}`"
            )
    return messages


def _without_idle_listeners(settings: Settings) -> Settings:
    return msgspec.structs.replace(
        settings,
        listen_ollama=settings.listen_ollama if settings.ollama_url else None,
        listen_comfy=settings.listen_comfy if settings.comfy_url else None,
    )


def _contradictions(settings: Settings) -> list[str]:
    listeners = {
        "LISTEN_OLLAMA": settings.listen_ollama,
        "LISTEN_COMFY": settings.listen_comfy,
        "LISTEN_ADMIN": settings.listen_admin,
    }
    upstreams = {"OLLAMA_URL": settings.ollama_url, "COMFY_URL": settings.comfy_url}
    found = contradictions(listeners, upstreams, settings.admin_token)
    return [f"{_invalid(name, text)}; use {advice}" for name, text, advice in found]


def describe(settings: Settings) -> Iterable[tuple[str, str]]:
    """Name and text of every setting, as a person would write it; what is secret is masked."""
    for variable in VARIABLES:
        yield variable.name, variable.show(getattr(settings, variable.field))


def _invalid(name: str, text: str) -> str:
    shown = printable(text)
    if name == "ADMIN_TOKEN" and text:
        shown = _MASK
    elif name.endswith("_URL"):
        shown = forms.masked(shown)
    return f"invalid `{name}`: {shown}"
