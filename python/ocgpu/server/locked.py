"""Requests that need the card: read whole, wait for the lock, relay, release.

The body is read before the wait, because a client that leaves shows only after its body was read.
It stays accounted for until the request has ended, not until the grant: it is in memory that long,
and any number of LLM requests may be granted at one time.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from ocgpu.server.admission import Admission
from ocgpu.server.arbiter import Kind
from ocgpu.server.endings import Endings
from ocgpu.server.engines.engine import Engine
from ocgpu.server.image_job import ImageJobs, Prompt
from ocgpu.server.refusal import RefusedError
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
from ocgpu.server.relay.client import HttpUpstream
from ocgpu.server.relay.headers import response_headers
from ocgpu.server.relay.http import Ending, Outgoing, StalledClientError, relay_http
from ocgpu.server.relay.upstream import UpstreamError
from ocgpu.server.relay.watch import DisconnectWatch, hang_up
from ocgpu.server.upload import read_body
from ocgpu.server.wait_stream import Form, WaitStream, form_of

__all__ = ["LockedRoute"]

logger: Final = logging.getLogger("ocgpu.server")


class LockedRoute:
    """Takes the requests of one listener that need the lock.

    Args:
        admission: The lock.
        engine: Says whether a body needs the card after all.
        upstream: Where requests go.
        jobs: Runs image jobs; None on a listener that has no image routes.
        waits: Longest wait in seconds by kind, from the request's arrival on; 0 is no limit.
        stall_timeout: Seconds that a client may send no byte of its body, and take none of the
            answer while it holds the lock; 0 is no limit.
        endings: Told how requests end.
        wait_keepalive: Seconds between two signs of life to a stream that waits; 0 is none.
    """

    def __init__(
        self,
        admission: Admission,
        engine: Engine,
        upstream: HttpUpstream,
        jobs: ImageJobs | None,
        *,
        waits: dict[Kind, float],
        stall_timeout: float,
        endings: Endings,
        wait_keepalive: float = 0.0,
    ) -> None:
        self._admission = admission
        self._engine = engine
        self._upstream = upstream
        self._jobs = jobs
        self._waits = waits
        self._stall_timeout = stall_timeout
        self._endings = endings
        self._wait_keepalive = wait_keepalive

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, kind: Kind
    ) -> None:
        """Serve one request of `kind`; `headers` are those for the upstream."""
        arrived = time.monotonic()
        reservation = self._admission.reserve(kind)
        try:
            body = await read_body(scope["headers"], receive, reservation, self._stall_timeout)
            if not self._engine.needs_lock(kind, scope["path"], body):
                outgoing = Outgoing(headers, body)
                ending = await relay_http(scope, receive, send, self._upstream, outgoing)
                self._endings.note(scope, ending)
            elif kind is Kind.IMAGE and self._jobs is not None:
                prompt = Prompt(target_of(scope), headers, body)
                await self._image(self._jobs, prompt, scope, receive, send, arrived)
            else:
                outgoing = Outgoing(headers, body, self._stall_timeout)
                await self._llm(scope, receive, send, outgoing, arrived)
        except ClientGoneError:
            await hang_up(send)
        except RefusedError as refusal:
            await _refuse(scope, send, refusal)
        finally:
            reservation.release()

    async def _llm(
        self, scope: Scope, receive: Receive, send: Send, outgoing: Outgoing, arrived: float
    ) -> None:
        form = None
        if self._wait_keepalive:
            form = form_of(scope["path"], outgoing.headers, outgoing.body or b"")
        if form is not None:
            await self._llm_stream(form, scope, receive, send, outgoing, arrived)
            return
        limit = self._waits[Kind.LLM]
        with _ending_with_client(scope, receive):
            grant = await self._admission.acquire(Kind.LLM, timeout=limit, arrived=arrived)
        with grant:
            await self._relay(scope, receive, send, outgoing)

    async def _llm_stream(
        self,
        form: Form,
        scope: Scope,
        receive: Receive,
        send: Send,
        outgoing: Outgoing,
        arrived: float,
    ) -> None:
        """Serve a request whose stream may begin while it waits."""
        stream = WaitStream(send, form, self._wait_keepalive, self._stall_timeout)
        limit = self._waits[Kind.LLM]
        stream.start()
        try:
            with _ending_with_client(scope, receive):
                grant = await self._admission.acquire(Kind.LLM, timeout=limit, arrived=arrived)
            with grant:
                stream.granted()
                if stream.begun:
                    # The head that says how the body is coded went out already.
                    kept = [h for h in outgoing.headers if h[0] != b"accept-encoding"]
                    outgoing = replace(outgoing, headers=kept)
                await self._relay(scope, receive, stream.send, outgoing)
        except ClientGoneError:
            if not stream.begun:
                raise
        except RefusedError as refusal:
            with contextlib.suppress(StalledClientError):
                await _refuse(scope, stream.send, refusal)
        finally:
            stream.stop()

    async def _relay(self, scope: Scope, receive: Receive, send: Send, outgoing: Outgoing) -> None:
        """Relay a request that holds the lock, until the card is really free of it."""
        ending = await relay_http(scope, receive, send, self._upstream, outgoing)
        self._endings.note(scope, ending)
        if ending is Ending.CLIENT_GONE:
            await self._engine.quiet()

    async def _image(
        self,
        jobs: ImageJobs,
        prompt: Prompt,
        scope: Scope,
        receive: Receive,
        send: Send,
        arrived: float,
    ) -> None:
        limit = self._waits[Kind.IMAGE]
        try:
            with _ending_with_client(scope, receive):
                grant = await self._admission.acquire(Kind.IMAGE, timeout=limit, arrived=arrived)
                reply = await jobs.post(grant, prompt)
        except UpstreamError as error:
            await send_error(send, 502, "upstream", str(error))
            return
        headers = [h for h in response_headers(reply.headers) if h[0] != b"content-length"]
        await send_whole(send, reply.status, headers, reply.body)


@contextlib.contextmanager
def _ending_with_client(scope: Scope, receive: Receive) -> Iterator[None]:
    """Cancel what is done inside when the client leaves.

    Raises:
        ClientGoneError: It left.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a request outside of a task")
    watch = DisconnectWatch(receive, task, scope)
    watch.arm()
    try:
        yield
    except asyncio.CancelledError:
        if watch.gone:
            raise ClientGoneError from None
        raise
    finally:
        watch.stop()


async def _refuse(scope: Scope, send: Send, refusal: RefusedError) -> None:
    logger.warning("refused: %s", refusal.message, extra={"path": scope["path"]})
    await send_error(
        send, refusal.status, refusal.reason, refusal.message, retry_after=refusal.retry_after
    )
