"""`GET /props` on the Ollama listener: the upstream's document with our peers merged in.

llama-server answers `/props`, Ollama does not; dashboards of the fleet read the block either way.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from ocgpu.server.outgoing import OutgoingHeaders
from ocgpu.server.relay.asgi import (
    Headers,
    Receive,
    Scope,
    Send,
    send_error,
    send_json,
    send_whole,
    target_of,
)
from ocgpu.server.relay.control import Reply, read_reply
from ocgpu.server.relay.headers import response_headers
from ocgpu.server.relay.upstream import Upstream, UpstreamError
from ocgpu.server.relay.watch import DisconnectWatch

__all__ = ["Props"]


class Props:
    """The ASGI callable for that one path.

    Args:
        outgoing: Makes the request's headers.
        upstream: Where the document comes from.
        gpu_share: Gives the block that is merged in.
    """

    def __init__(
        self,
        outgoing: OutgoingHeaders,
        upstream: Upstream,
        gpu_share: Callable[[], dict[str, Any]],
    ) -> None:
        self._outgoing = outgoing
        self._upstream = upstream
        self._gpu_share = gpu_share

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; one whose client leaves is ended upstream as well."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request outside of a task")
        watch = DisconnectWatch(receive, task)
        watch.arm()
        try:
            reply = await self._ask(scope)
        except UpstreamError as error:
            await send_error(send, 502, "upstream", str(error))
            return
        except asyncio.CancelledError:
            if not watch.gone:
                raise
            return
        finally:
            watch.stop()
        if reply.status == 404:
            await send_json(send, 200, {"opencoti": {"gpu_share": self._gpu_share()}})
            return
        merged = _merged(reply.body, self._gpu_share) if reply.status == 200 else None
        answer = reply.body if merged is None else merged
        await send_whole(send, reply.status, _without_length(reply.headers), answer)

    async def _ask(self, scope: Scope) -> Reply:
        # Merging needs the plain document.
        headers = [h for h in self._outgoing(scope) if h[0] != b"accept-encoding"]
        async with self._upstream.request(
            "GET", target_of(scope), headers, None, fresh=False
        ) as response:
            return await read_reply(response)


def _merged(body: bytes, gpu_share: Callable[[], dict[str, Any]]) -> bytes | None:
    """Give the document with the block in it, or None when it is no JSON object."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(document, dict):
        return None
    block = document.get("opencoti")
    block = block if isinstance(block, dict) else {}
    document["opencoti"] = {**block, "gpu_share": gpu_share()}
    return msgspec.json.encode(document)


def _without_length(headers: Headers) -> Headers:
    return [h for h in response_headers(headers) if h[0] not in (b"content-length", b"etag")]
