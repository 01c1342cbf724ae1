"""How the text of a setting is read: a parser for each legal form, and the phrase to describe it.

A parser takes text without white space around it and raises ValueError outside its form; the caller
knows the name of the setting and says the rest.
"""

import ipaddress
import re
from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import unquote

import msgspec

from ocgpu._ocgpu import is_gpu_key, is_weight
from ocgpu.durations import parse_duration

__all__ = [
    "BYTES_FORM",
    "HOSTS_FORM",
    "LISTEN_FORM",
    "POSITIVE_FORM",
    "URL_FORM",
    "Listen",
    "byte_count",
    "choice",
    "format_bytes",
    "gpu_key",
    "hosts",
    "integer",
    "listen",
    "masked",
    "matching",
    "positive_duration",
    "url",
    "weight",
]

T = TypeVar("T")

LISTEN_FORM: Final = (
    "`:port` for all interfaces, `IPv4:port`, `[IPv6]:port`, `localhost:port` or `off`"
)
URL_FORM: Final = (
    "`http[s]://[user:password@]host[:port][/path]`, special characters percent-encoded, or nothing"
)
POSITIVE_FORM: Final = "a duration above 0 such as `1m30s` or `500ms`"
BYTES_FORM: Final = "bytes above 0 such as `1073741824`, `512MiB` or `1GiB`"
HOSTS_FORM: Final = "host names without port, a comma between them"

_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")
# RFC 3986: what may stand unencoded in a login and in a path's segment, and an escape.
_ESCAPE: Final = "%[0-9A-Fa-f]{2}"
_LOGIN: Final = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_ESCAPE})+"
_SEGMENT: Final = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_ESCAPE})*"
_URL: Final = re.compile(
    rf"(?P<scheme>https?)://(?:(?P<login>{_LOGIN})@)?(?P<host>\[[^]]+\]|[^][@/:?#%]+)"
    rf"(?::(?P<port>[1-9][0-9]{{0,4}}))?(?P<path>(?:/{_SEGMENT})*)",
    re.IGNORECASE | re.ASCII,
)
_CONTROL: Final = re.compile("[\x00-\x1f\x7f]")
_BYTES: Final = re.compile(r"([0-9]{1,12})(KiB|MiB|GiB)?")
_BYTES_SHIFT: Final = {"KiB": 10, "MiB": 20, "GiB": 30}
_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")
_PORT: Final = re.compile(r"[0-9]{1,5}")
_PORT_MAX: Final = 65535


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Where a listener binds.

    Attributes:
        host: IP literal; `::` is every interface, IPv4 too.
        port: 0 to 65535; 0 lets the kernel choose.
    """

    host: str
    port: int

    def __str__(self) -> str:
        if self.host == "::":
            return f":{self.port}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen(text: str) -> Listen | None:
    """Read the address of a listener; None for `off`."""
    if text.lower() == "off":
        return None
    host, colon, port = text.rpartition(":")
    if not colon or _PORT.fullmatch(port) is None or int(port) > _PORT_MAX or "%" in host:
        raise ValueError(text)
    if host == "":
        host = "::"
    elif host.startswith("[") and host.endswith("]"):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    elif host.lower() == "localhost":
        host = "127.0.0.1"
    else:
        # A name may have several addresses, and others tomorrow; we do not guess which to bind.
        host = str(ipaddress.IPv4Address(host))
    return Listen(host=host, port=int(port))


def url(text: str) -> str:
    """Read the URL of an upstream, without a slash at its end; "" for none.

    A query has no place in it: a request brings its own. Neither has a segment `..`: the engine
    would take it away together with what stands before it.
    """
    if text == "":
        return ""
    match = _URL.fullmatch(text)
    if match is None or int(match["port"] or 1) > _PORT_MAX or not _is_host(match["host"]):
        raise ValueError(text)
    login = match["login"] or ""
    user = unquote(login.partition(":")[0])
    segments = re.split(r"[/\\]", unquote(match["path"]))
    # RFC 7617: a user with a colon would be another user, and control characters are not allowed.
    if ":" in user or _CONTROL.search(unquote(login) + "".join(segments)):
        raise ValueError(text)
    if {".", ".."} & set(segments):
        raise ValueError(text)
    return match["scheme"].lower() + text[len(match["scheme"]) :].rstrip("/")


def masked(text: str) -> str:
    """Give a URL without its login, and what was meant to be one without all that may be secret."""
    if _URL.fullmatch(text):
        return re.sub("//[^/]*@", "//…@", text)
    shown = re.sub("^([A-Za-z]*://)?.*@", r"\1…@", text, flags=re.DOTALL)
    return re.sub("[?#].+", "?…", shown, flags=re.DOTALL)


def hosts(text: str) -> tuple[str, ...]:
    """Read host names with commas between them, in lower case."""
    names = tuple(name.strip().lower() for name in text.split(","))
    if not all(_HOST.fullmatch(name) for name in names):
        raise ValueError(text)
    return names


def _is_host(host: str) -> bool:
    if not host.startswith("["):
        return _HOST.fullmatch(host) is not None
    if "%" in host:
        # A zone (`fe80::1%eth0`) has no agreed form in a URL.
        return False
    ipaddress.IPv6Address(host[1:-1])
    return True


def weight(text: str) -> float:
    """Read a weight; the schedule counts in thousandths from 1 to 1,000,000."""
    if _NUMBER.fullmatch(text) is None:
        raise ValueError(text)
    value = float(text)
    if not is_weight(value):
        raise ValueError(text)
    return value


def gpu_key(text: str) -> str:
    """Read a GPU key."""
    if not is_gpu_key(text):
        raise ValueError(text)
    return text


def positive_duration(text: str) -> float:
    """Read a Go duration above 0, in seconds."""
    seconds = parse_duration(text)
    if seconds == 0.0:
        raise ValueError(text)
    return seconds


def byte_count(text: str) -> int:
    """Read a size in bytes, above 0; `KiB`, `MiB` and `GiB` are powers of 1024."""
    match = _BYTES.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise ValueError(text)
    return int(match[1]) << _BYTES_SHIFT.get(match[2], 0)


def format_bytes(count: int) -> str:
    """Write a size as `byte_count` reads it, in the largest unit that divides it."""
    for unit, shift in sorted(_BYTES_SHIFT.items(), key=lambda item: -item[1]):
        if count % (1 << shift) == 0:
            return f"{count >> shift}{unit}"
    return str(count)


def integer(minimum: int) -> Callable[[str], int]:
    """Make the parser of a whole number from `minimum` on."""

    def parse(text: str) -> int:
        if re.fullmatch(r"[0-9]{1,9}", text) is None or int(text) < minimum:
            raise ValueError(text)
        return int(text)

    return parse


def choice(values: dict[str, T]) -> Callable[[str], T]:
    """Make the parser of one word out of `values`, in lower or upper case."""

    def parse(text: str) -> T:
        if text.lower() not in values:
            raise ValueError(text)
        return values[text.lower()]

    return parse


def matching(pattern: str) -> Callable[[str], str]:
    """Make the parser of text that matches `pattern` whole."""

    def parse(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(text)
        return text

    return parse
