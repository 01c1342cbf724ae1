"""Who may use our own endpoints: no foreign web page, and on the admin listener no stranger.

A page has two ways to a listener on the user's own network. It asks straight away, across origins:
then the browser says so in `Origin` or `Sec-Fetch-Site`, which no script can forge. Or its own name
is made to point here after it was loaded (DNS rebinding): then the browser takes us for the page's
own server, and `Host` is all that differs.

The admin listener therefore answers to known Hosts alone, whoever asks. The listeners of the
engines are monitored under any name that a front proxy has, so there the Host counts only when a
browser asks: a page cannot keep its browser from sending `Accept-Language`, and monitors send none.
`Sec-Fetch-Site` is sent over TLS and to loopback alone, so a browser that says `same-origin` has
checked a certificate for the name: no rebound page can have that.
"""

import hmac
import ipaddress
import re
import string
from collections.abc import Awaitable, Callable
from typing import Final

from ocgpu.server.relay.asgi import Headers, Scope, Send, header, send_error, send_json

__all__ = ["host_names", "is_foreign_page", "make_guard", "malformed", "turn_away"]

_AUTHORITY: Final = re.compile(
    rb"(?:(?P<name>[a-z0-9_](?:[a-z0-9._-]{0,253}[a-z0-9_])?)\.?|\[(?P<six>[0-9a-f:.]{2,45})\])"
    rb"(?::[0-9]{0,5})?"
)
# What names, addresses and ports are made of (RFC 3986 section 3.2.2), no login among it.
_HOST_BYTES: Final = (string.ascii_letters + string.digits + "-._~%!$&'()*+,;=:[]").encode()
_OWN_SITES: Final = frozenset((b"same-origin", b"none"))
_LOOK: Final = frozenset(("GET", "HEAD"))
# No browser lets a script take these out of a request.
_BROWSER: Final = frozenset(
    (b"accept-language", b"origin", b"referer", b"upgrade-insecure-requests")
)
# Ends of names that nobody can register, RFC 6761, 6762, 8375 and ICANN's `internal`.
_PRIVATE: Final = (".localhost", ".local", ".internal", ".home.arpa")


def make_guard(hosts: tuple[str, ...], token: str) -> Callable[[Scope, Send], Awaitable[bool]]:
    """Make the guard of the admin listener; it answers what it refuses, and says so with True.

    Args:
        hosts: Names that are allowed besides `localhost` and addresses.
        token: Bearer token; "" asks for none. `GET /healthz` needs none in any case.
    """
    known = host_names(hosts)
    wanted = token.encode()

    async def guard(scope: Scope, send: Send) -> bool:
        headers: Headers = scope["headers"]
        fault = malformed(scope)
        name = _host_name(headers)
        if fault is not None or name is None:
            await send_error(send, 400, "request", fault or "a Host that is none")
        elif not (name in known or _is_local(name)):
            message = f"unknown Host: {name}; add it to `ADMIN_HOSTS`"
            await send_error(send, 403, "host", message)
        elif _crosses_origins(headers) and not _is_link(scope):
            await send_error(send, 403, "origin", "a page of another origin may not ask here")
        elif not wanted or _is_health_check(scope) or _has_token(headers, wanted):
            return False
        else:
            body = {"error": "send `Authorization: Bearer <ADMIN_TOKEN>`", "reason": "token"}
            await send_json(send, 401, body, [(b"www-authenticate", b"Bearer")])
        return True

    return guard


def host_names(hosts: tuple[str, ...]) -> frozenset[str]:
    """Give the names of `ADMIN_HOSTS` as the guards compare them."""
    return frozenset(host.lower().removesuffix(".") for host in hosts)


def is_foreign_page(headers: Headers, hosts: frozenset[str]) -> bool:
    """Whether a page asks that is not ours: one of another origin, or one whose name was rebound.

    Args:
        headers: The request's.
        hosts: Names of ours, of `host_names`, besides addresses, names without a dot and those that
            nobody can register.
    """
    if _crosses_origins(headers):
        return True
    if header(headers, b"sec-fetch-site") is not None:
        return False
    if not any(name in _BROWSER for name, _ in headers):
        return False
    name = _host_name(headers)
    return name is None or not (name in hosts or _is_local(name) or _is_private(name))


def malformed(scope: Scope) -> str | None:
    """Say what is wrong with a request whose meaning two servers could differ about, or None.

    RFC 9112 section 3.2 asks for exactly one Host.
    """
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) > 1:
        return "more than one Host"
    if not (hosts and hosts[0]) and scope.get("http_version") == "1.1":
        return "no Host"
    if hosts and hosts[0].translate(None, _HOST_BYTES):
        return "a Host that is none"
    return None


async def turn_away(scope: Scope, send: Send, status: int, reason: str, message: str) -> None:
    """Answer a request or a websocket's handshake that is not served; the latter gets a 403."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000, "reason": ""})
    else:
        await send_error(send, status, reason, message)


def _host_name(headers: Headers) -> str | None:
    """Give the name or address that the client asked for, in lower case; None when it is neither.

    Without port, brackets and the dot at the end of a full name.
    """
    match = _AUTHORITY.fullmatch((header(headers, b"host") or b"").lower())
    if match is None:
        return None
    found: bytes = match["name"] or match["six"]
    return found.decode("ascii")


def _crosses_origins(headers: Headers) -> bool:
    """Whether a browser says that a page of another origin asks."""
    host = (header(headers, b"host") or b"").lower()
    own = (b"http://" + host, b"https://" + host)
    return any(
        (name == b"origin" and value.lower() not in own)
        or (name == b"sec-fetch-site" and value not in _OWN_SITES)
        for name, value in headers
    )


def _is_link(scope: Scope) -> bool:
    """Whether a person followed a link to here: the page with the link sees no answer."""
    headers: Headers = scope["headers"]
    return (
        scope["method"] in _LOOK
        and header(headers, b"origin") is None
        and header(headers, b"sec-fetch-mode") == b"navigate"
        and header(headers, b"sec-fetch-dest") == b"document"
    )


def _is_health_check(scope: Scope) -> bool:
    return scope["path"] == "/healthz" and scope["method"] in _LOOK


def _has_token(headers: Headers, wanted: bytes) -> bool:
    kind, _, given = (header(headers, b"authorization") or b"").partition(b" ")
    return kind.lower() == b"bearer" and hmac.compare_digest(given.strip(), wanted)


def _is_local(name: str) -> bool:
    """Whether it is `localhost` or an address: no page can have an address's name rebound."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_private(name: str) -> bool:
    """Whether no stranger can own the name: a container's, or one of a private zone."""
    return "." not in name or name.endswith(_PRIVATE)
