"""Short JSON calls of our own to an upstream: look, unload, free. Each has a time-out."""

import asyncio
from typing import Any, NamedTuple

import msgspec

from ocgpu.server.relay.asgi import Headers
from ocgpu.server.relay.upstream import Upstream, UpstreamError, UpstreamResponse

__all__ = ["Control", "Reply", "UpstreamTimeoutError", "json_object", "read_reply"]


class UpstreamTimeoutError(UpstreamError):
    """The upstream took the call and did not answer in time: it is busy or hung."""


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes

    @property
    def accepted(self) -> bool:
        """Whether the status is a success."""
        return 200 <= self.status <= 299

    def document(self) -> dict[str, Any] | None:
        """Give the JSON object of a success, or None when there is none."""
        return json_object(self.body) if self.accepted else None


async def read_reply(response: UpstreamResponse) -> Reply:
    """Read an answer to its end.

    Raises:
        UpstreamError: The upstream broke off.
    """
    parts = []
    while piece := await response.read():
        parts.append(piece)
    return Reply(response.status, response.headers, b"".join(parts))


def json_object(body: bytes) -> dict[str, Any] | None:
    """Give the JSON object that a body holds, or None; nothing that an upstream says raises."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


class Control:
    """Calls to one upstream, on connections of the relay's own client.

    Args:
        upstream: The engine.
    """

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream

    async def get(self, path: str, *, timeout: float) -> Reply:
        """Get a document.

        Args:
            path: Path and query, percent-encoded.
            timeout: Seconds for the whole answer.

        Raises:
            UpstreamError: No answer, or none in time.
        """
        return await self._call("GET", path, None, timeout)

    async def post(self, path: str, value: object, *, timeout: float) -> Reply:
        """Post a JSON document; see `get`."""
        return await self._call("POST", path, msgspec.json.encode(value), timeout)

    async def _call(self, method: str, path: str, body: bytes | None, timeout: float) -> Reply:
        headers = [
            (b"host", self.upstream.authority),
            (b"accept", b"application/json"),
            (b"accept-encoding", b"identity"),
            (b"user-agent", b"ocgpu"),
        ]
        if body is not None:
            headers.append((b"content-type", b"application/json"))
        target = path.encode("ascii")
        try:
            async with (
                asyncio.timeout(timeout),
                self.upstream.request(
                    method, target, headers, body, fresh=body is not None
                ) as response,
            ):
                return await read_reply(response)
        except TimeoutError:
            message = f"no answer from {self.upstream.url}{path} within {timeout:g}s"
            raise UpstreamTimeoutError(message) from None
