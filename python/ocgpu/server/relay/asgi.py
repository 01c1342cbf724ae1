"""The ASGI types of the byte path, and the short answers that are ours.

Own types and not Litestar's: Granian's scopes differ in details (ports are strings), and the byte
path does not depend on the control plane.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

__all__ = [
    "App",
    "ClientGoneError",
    "Headers",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "header",
    "send_error",
    "send_json",
    "send_whole",
    "target_of",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class ClientGoneError(Exception):
    """The client left before its request was complete."""


def target_of(scope: Scope) -> bytes:
    """Give the request target byte for byte, as far as Granian keeps it."""
    raw: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    return raw + b"?" + query if query else raw


def header(headers: Headers, name: bytes) -> bytes | None:
    """Give the first value of a header, or None; `name` in lower case, as Granian gives names."""
    for key, value in headers:
        if key == name:
            return value
    return None


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Answer with a body that is at hand; its length is set here."""
    length = (b"content-length", b"%d" % len(body))
    start = {"type": "http.response.start", "status": status, "headers": [*headers, length]}
    await send(start)
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: object, headers: Headers | None = None) -> None:
    """Answer with a JSON document of our own."""
    kind = (b"content-type", b"application/json")
    await send_whole(send, status, [kind, *(headers or [])], msgspec.json.encode(value))


async def send_error(
    send: Send, status: int, reason: str, message: str, *, retry_after: int | None = None
) -> None:
    """Answer with an error of our own.

    `error` is a text because that is where the clients of Ollama and of OpenAI look for one.
    """
    headers = [(b"retry-after", b"%d" % retry_after)] if retry_after is not None else []
    await send_json(send, status, {"error": message, "reason": reason}, headers)
