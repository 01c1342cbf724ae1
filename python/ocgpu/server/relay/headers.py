"""Header rules of the byte path: what belongs to one hop stays there, the rest passes as it is.

RFC 9110 section 7.6.1 (hop-by-hop), RFC 9112 section 6 (framing).
"""

import re
from typing import Final

from ocgpu.server.relay.asgi import Headers, Scope, header

__all__ = ["NAME_MAX", "forwarded", "legal", "request_headers", "response_headers", "streams"]

_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_TOKEN: Final = b"!#$%&'*+-.^_`|~0123456789" + bytes(
    letter for letter in range(128) if chr(letter).isalpha()
)
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
# What Granian's HTTP library takes for a name.
NAME_MAX: Final = 32_768
# `Expect: 100-continue` is answered by our own listener as soon as the body is asked for.
_REQUEST_DROP: Final = _HOP | {b"expect"}
# Where a request came from, as proxies say it besides `X-Forwarded-*` (RFC 7239).
_ORIGINS: Final = frozenset((b"forwarded", b"x-real-ip"))
_PROTOCOLS: Final = {"http": b"http", "ws": b"http", "https": b"https", "wss": b"https"}
# Naming these in `Connection` must not strip what routes and frames the message.
_KEPT: Final = frozenset((b"host", b"content-length", b"content-type", b"authorization"))


def request_headers(headers: Headers) -> Headers:
    """Give the request headers that go on to the upstream."""
    kept = [h for h in headers if h[0] not in _REQUEST_DROP]
    if [name for name, _ in kept].count(b"content-length") > 1:
        kept = _said_once(kept)
    if len(kept) == len(headers):
        return kept
    named = _named(headers)
    return [h for h in kept if h[0] not in named] if named else kept


def response_headers(headers: Headers) -> Headers:
    """Give the response headers that go on to the client, names in lower case.

    An upstream's `Server` and `Date` pass; Granian adds its own only where there is none.
    `X-Accel-Buffering: no` is added to event streams and NDJSON, or a front nginx holds them back.
    """
    low = [(name.lower(), value) for name, value in headers]
    kept = [h for h in low if h[0] not in _HOP]
    if len(kept) != len(low) and (named := _named(low)):
        kept = [h for h in kept if h[0] not in named]
    if streams(kept) and header(kept, b"x-accel-buffering") is None:
        kept.append((b"x-accel-buffering", b"no"))
    return kept


def legal(headers: Headers) -> bool:
    """Whether our listener can send these headers: names are tokens, values have no controls.

    Others would end as an answer 500 that nobody explains (RFC 9110 sections 5.1 and 5.5).
    """
    names = [name for name, _ in headers]
    # Joined, a look at all of them costs as much as one at a single header.
    return (
        all(names)
        and max(map(len, names), default=0) <= NAME_MAX
        and not b"".join(names).translate(None, _TOKEN)
        and not _CONTROL.search(b"".join([value for _, value in headers]))
    )


def forwarded(headers: Headers, scope: Scope, *, trusted: bool = True) -> Headers:
    """Give the headers with `X-Forwarded-*` as a good proxy leaves them.

    `-For` grows by the client's address; `-Proto` and `-Host` are set unless a proxy in front of
    us has set them.

    Args:
        headers: The request's.
        scope: The connection's.
        trusted: Whether the client is a proxy that is believed. Of any other one, what it claims
            about where the request came from is dropped.
    """
    before: list[bytes] = []
    given: set[bytes] = set()
    claims = [h for h in headers if h[0].startswith(b"x-forwarded-") or h[0] in _ORIGINS]
    if claims and trusted:
        before = [value for name, value in claims if name == b"x-forwarded-for"]
        given = {name for name, _ in claims}
        out = [h for h in headers if h[0] != b"x-forwarded-for"]
    elif claims:
        out = [h for h in headers if h not in claims]
    else:
        out = headers.copy()
    if client := scope.get("client"):
        before.append(str(client[0]).removeprefix("::ffff:").encode("latin-1"))
    if before:
        out.append((b"x-forwarded-for", b", ".join(before)))
    if b"x-forwarded-proto" not in given:
        out.append((b"x-forwarded-proto", _PROTOCOLS[scope["scheme"]]))
    if b"x-forwarded-host" not in given and (host := header(headers, b"host")) is not None:
        out.append((b"x-forwarded-host", host))
    return out


def _said_once(headers: Headers) -> Headers:
    """Give the headers with the first length alone; all are equal, or our listener had refused."""
    out: Headers = []
    for h in headers:
        if h[0] != b"content-length" or header(out, b"content-length") is None:
            out.append(h)
    return out


def streams(headers: Headers) -> bool:
    """Whether a body with these headers is read piece by piece while it is made."""
    kind = header(headers, b"content-type") or b""
    media = kind.split(b";", 1)[0].strip().lower()
    return media in (b"text/event-stream", b"application/x-ndjson", b"application/ndjson")


def _named(headers: Headers) -> frozenset[bytes]:
    """Header names that `Connection` declares to be for this hop only."""
    values = [value for name, value in headers if name == b"connection"]
    if not values:
        return frozenset()
    names = {token.strip().lower() for value in values for token in value.split(b",")}
    return frozenset(names - _KEPT)
