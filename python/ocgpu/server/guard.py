"""Who may use the control plane: known Hosts, no foreign web page, and the token if one is set.

The Host list keeps out a page whose own name was made to point at this machine (DNS rebinding), the
Origin rule keeps out a page that posts to a loopback address straight away.
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable

from ocgpu.server.relay.asgi import Headers, Scope, Send, header, send_error, send_json

__all__ = ["make_guard"]


def make_guard(hosts: tuple[str, ...], token: str) -> Callable[[Scope, Send], Awaitable[bool]]:
    """Make the guard of the admin listener.

    Args:
        hosts: Names that are allowed besides `localhost` and addresses.
        token: Bearer token; "" asks for none. `GET /healthz` needs none in any case.
    """
    allowed = frozenset(host.lower() for host in hosts)
    wanted = token.encode()

    async def guard(scope: Scope, send: Send) -> bool:
        headers: Headers = scope["headers"]
        host = (header(headers, b"host") or b"").decode("latin-1").lower()
        name = _host_name(host)
        if not (name in allowed or _is_local(name)):
            message = f"unknown Host: {name}; add it to `ADMIN_HOSTS`"
            await send_error(send, 403, "host", message)
            return True
        origin = header(headers, b"origin")
        if origin is not None and origin.decode("latin-1").lower().partition("//")[2] != host:
            await send_error(send, 403, "origin", "a page of another origin may not ask here")
            return True
        if not wanted or (scope["path"] == "/healthz" and scope["method"] in ("GET", "HEAD")):
            return False
        given = (header(headers, b"authorization") or b"").partition(b" ")
        if given[0].lower() == b"bearer" and hmac.compare_digest(given[2].strip(), wanted):
            return False
        challenge = [(b"www-authenticate", b"Bearer")]
        body = {"error": "send `Authorization: Bearer <ADMIN_TOKEN>`", "reason": "token"}
        await send_json(send, 401, body, challenge)
        return True

    return guard


def _host_name(host: str) -> str:
    """Give the name in a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _is_local(name: str) -> bool:
    """Whether it is `localhost` or an address: no page can have an address's name rebound."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
