"""Requests that need the card: read whole, wait for the lock, relay, release.

The body is read before the wait, because a client that leaves shows only after its body was read.
"""

import asyncio
import logging
from typing import Final

from ocgpu.server.admission import Admission, BodyReservation, RefusedError
from ocgpu.server.arbiter import Kind
from ocgpu.server.engines.engine import Engine
from ocgpu.server.image_job import ImageJobs, Prompt
from ocgpu.server.relay.asgi import (
    ClientGoneError,
    Headers,
    Receive,
    Scope,
    Send,
    send_error,
    send_whole,
    target_of,
)
from ocgpu.server.relay.body import read_whole
from ocgpu.server.relay.headers import response_headers
from ocgpu.server.relay.http import Outgoing, relay_http
from ocgpu.server.relay.upstream import Upstream, UpstreamError
from ocgpu.server.relay.watch import DisconnectWatch, hang_up

__all__ = ["LockedRoute"]

logger: Final = logging.getLogger("ocgpu.server")


class LockedRoute:
    """Takes the requests of one listener that need the lock.

    Args:
        admission: The lock.
        engine: Says whether a body needs the card after all.
        upstream: Where requests go.
        jobs: Runs image jobs; None on a listener that has no image routes.
        waits: Longest wait in seconds by kind; 0 is no limit.
        stall_timeout: Seconds that a client may take no byte while it holds the lock; 0 is never.
    """

    def __init__(
        self,
        admission: Admission,
        engine: Engine,
        upstream: Upstream,
        jobs: ImageJobs | None,
        *,
        waits: dict[Kind, float],
        stall_timeout: float,
    ) -> None:
        self._admission = admission
        self._engine = engine
        self._upstream = upstream
        self._jobs = jobs
        self._waits = waits
        self._stall_timeout = stall_timeout

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, kind: Kind
    ) -> None:
        """Serve one request of `kind`; `headers` are those for the upstream."""
        reservation = self._admission.reserve()
        try:
            body = await read_whole(receive, reservation.grow, self._stall_timeout)
            if not self._engine.needs_lock(kind, scope["path"], body):
                outgoing = Outgoing(headers, body)
                await relay_http(scope, receive, send, self._upstream, outgoing)
            elif kind is Kind.IMAGE and self._jobs is not None:
                prompt = Prompt(target_of(scope), headers, body)
                await self._image(self._jobs, prompt, scope, receive, send, reservation)
            else:
                await self._llm(scope, receive, send, Outgoing(headers, body), reservation)
        except ClientGoneError:
            return
        except RefusedError as refusal:
            logger.warning("refused: %s", refusal.message, extra={"path": scope["path"]})
            retry_after = refusal.retry_after
            await send_error(send, 503, refusal.reason, refusal.message, retry_after=retry_after)
        finally:
            reservation.release()

    async def _llm(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        outgoing: Outgoing,
        reservation: BodyReservation,
    ) -> None:
        watch = _watch(scope, receive)
        try:
            grant = await self._admission.acquire(Kind.LLM, timeout=self._waits[Kind.LLM])
        except asyncio.CancelledError:
            if not watch.gone:
                raise
            await hang_up(send)
            return
        finally:
            watch.stop()
        with grant:
            reservation.release()
            stalling = Outgoing(outgoing.headers, outgoing.body, self._stall_timeout)
            await relay_http(scope, receive, send, self._upstream, stalling)

    async def _image(
        self,
        jobs: ImageJobs,
        prompt: Prompt,
        scope: Scope,
        receive: Receive,
        send: Send,
        reservation: BodyReservation,
    ) -> None:
        watch = _watch(scope, receive)
        try:
            grant = await self._admission.acquire(Kind.IMAGE, timeout=self._waits[Kind.IMAGE])
            reservation.release()
            reply = await jobs.post(grant, prompt)
        except UpstreamError as error:
            await send_error(send, 502, "upstream", str(error))
            return
        except asyncio.CancelledError:
            if not watch.gone:
                raise
            await hang_up(send)
            return
        finally:
            watch.stop()
        headers = [h for h in response_headers(reply.headers) if h[0] != b"content-length"]
        await send_whole(send, reply.status, headers, reply.body)


def _watch(scope: Scope, receive: Receive) -> DisconnectWatch:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a request outside of a task")
    watch = DisconnectWatch(receive, task, scope)
    watch.arm()
    return watch
