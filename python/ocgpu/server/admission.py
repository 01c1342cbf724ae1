"""The waiting around the arbiter: futures, time-outs, bounds, and one owned grant per request.

All of it runs on one event loop, and no `await` stands between a decision of the arbiter and its
bookkeeping here, so no lock is needed. `asyncio.timeout` and never `wait_for`: on Python 3.11
`wait_for` can swallow the cancellation of a client that leaves in the same moment.

A cancelled task runs again only in the loop's next turn, and until then the arbiter would grant to
it or let it hold others up. So the future that it waits on takes it out of the queue in the moment
of the cancellation, and the arbiter knows live waiters only.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from ocgpu.server.arbiter import Arbiter, Counts, Kind, State
from ocgpu.server.arbiter import Grant as ArbiterGrant
from ocgpu.server.metrics import Metrics

__all__ = ["RETRY_AFTER", "Admission", "BodyReservation", "Grant", "RefusedError", "Transition"]

logger: Final = logging.getLogger("ocgpu.server")

# Seconds that a refused client is told to wait. A card changes hands in seconds.
RETRY_AFTER: Final = 5
_HISTORY: Final = 200


class RefusedError(Exception):
    """The request is answered with an error of ours.

    Attributes:
        reason: One word for programs: one of `metrics.REFUSALS`.
        message: What a person reads.
        retry_after: Seconds, for `Retry-After`; None where trying again would not help.
        status: The answer's status.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        retry_after: int | None = RETRY_AFTER,
        status: int = 503,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        self.status = status


class Transition(NamedTuple):
    """One change of the lock's state, for the log and `/events`."""

    at: float
    before: State
    after: State
    cause: str


class Grant:
    """A granted request: whoever owns it must release it, in a `finally`.

    Attributes:
        continued: An image that took the lock over from an image: the LLM side is unloaded.
        waited: Seconds between the request and the grant.
    """

    __slots__ = ("_admission", "_id", "continued", "kind", "waited")

    def __init__(
        self, admission: "Admission", id_: int, kind: Kind, *, continued: bool, waited: float
    ) -> None:
        self._admission = admission
        self._id = id_
        self.kind = kind
        self.continued = continued
        self.waited = waited

    def finish(self) -> bool:
        """Whether the next image took the lock over; if not, free the card and `release`."""
        return self._admission._finish(self._id)  # the two are one object in halves

    def release(self) -> None:
        """Give the lock back. Twice is harmless, and so is after a reset."""
        self._admission._release(self._id)  # as above

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class BodyReservation:
    """Memory that the body of one locked request takes out of `MAX_WAITING_BYTES`."""

    __slots__ = ("_admission", "_kind", "_size")

    def __init__(self, admission: "Admission", kind: Kind) -> None:
        self._admission = admission
        self._kind = kind
        self._size = 0

    def check(self, size: int) -> None:
        """See whether `size` more bytes could be had now.

        Raises:
            RefusedError: All bodies together would be larger than allowed, or this one alone.
        """
        admission = self._admission
        if self._size + size > admission.max_waiting_bytes:
            limit = admission.max_waiting_bytes
            message = f"request body too large: over {limit} bytes; raise `MAX_WAITING_BYTES`"
            raise admission.refuse(
                self._kind, "body_too_large", message, status=413, retry_after=None
            )
        if admission.waiting_bytes + size > admission.max_waiting_bytes:
            message = "too many request bodies are waiting for the gpu"
            raise admission.refuse(self._kind, "body_memory", message)

    def grow(self, size: int) -> None:
        """Take `size` more bytes.

        Raises:
            RefusedError: As `check`.
        """
        self.check(size)
        self._admission.waiting_bytes += size
        self._size += size

    def too_slow(self) -> RefusedError:
        """Give the refusal of a body that does not arrive."""
        message = "the request body did not arrive in time"
        return self._admission.refuse(
            self._kind, "body_timeout", message, status=408, retry_after=None
        )

    def release(self) -> None:
        """Give all of it back. Twice is harmless."""
        self._admission.waiting_bytes -= self._size
        self._size = 0


class _Waiter(asyncio.Future[ArbiterGrant]):
    """What a request waits on; it leaves the queue in the moment it is cancelled."""

    def __init__(self, leave: Callable[[], None]) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._leave = leave

    @property
    def granted(self) -> bool:
        """Whether the arbiter's grant came."""
        return self.done() and not self.cancelled() and self.exception() is None

    def cancel(self, msg: Any = None) -> bool:  # noqa: ANN401  # as the base class has it
        """Cancel and leave."""
        cancelled = super().cancel(msg)
        if cancelled:
            self._leave()
        return cancelled


class Admission:
    """Lets requests wait for the arbiter's grant, and for nothing longer than they may.

    Args:
        arbiter: The rule; nobody else may feed it.
        metrics: Takes the seconds of every wait that ended in a grant, and counts the others.
        max_queue: Requests that may wait at one time.
        max_waiting_bytes: Bytes that the bodies of locked requests may take together, from their
            first byte to the end of the request.
        on_change: Called after every change of state, with the new state.
    """

    def __init__(
        self,
        arbiter: Arbiter,
        metrics: Metrics,
        *,
        max_queue: int,
        max_waiting_bytes: int,
        on_change: Callable[[State], None] | None = None,
    ) -> None:
        self._arbiter = arbiter
        self._metrics = metrics
        self._max_queue = max_queue
        self.max_waiting_bytes = max_waiting_bytes
        self.waiting_bytes = 0
        self._on_change = on_change
        # Takes a lock that was handed over, with a card that is not freed, to one who just left.
        self.on_abandoned: Callable[[Grant], None] = Grant.release
        self._ids = itertools.count(1)
        self._waiters: dict[int, _Waiter] = {}
        self._closed = False
        self._state = State.IDLE
        self.transitions: deque[Transition] = deque(maxlen=_HISTORY)

    @property
    def counts(self) -> Counts:
        """The lock as it is now."""
        return self._arbiter.counts

    @property
    def closed(self) -> bool:
        """Whether the server is draining."""
        return self._closed

    def reserve(self, kind: Kind) -> BodyReservation:
        """Begin to account for the body of a request that may have to wait."""
        return BodyReservation(self, kind)

    async def acquire(
        self, kind: Kind, *, timeout: float = 0.0, arrived: float | None = None
    ) -> Grant:
        """Wait for the lock.

        A cancelled wait leaves nothing behind, whatever the phase: a waiter is removed, and a
        grant that came in the same moment is given back.

        Args:
            kind: What the card is wanted for.
            timeout: Seconds to wait at most; 0 is no limit.
            arrived: When the request came, by `time.monotonic`: the time-out counts from there.
                None is now. Over its time already, a request is still granted a free card.

        Raises:
            RefusedError: The queue is full, the time is over, or the server shuts down.
        """
        if self._closed:
            raise self._shutdown(kind)
        began = time.monotonic()
        id_ = next(self._ids)
        waiter = _Waiter(lambda: self._deliver(self._arbiter.cancel(id_), "waiter left"))
        self._waiters[id_] = waiter
        try:
            self._deliver(self._arbiter.request(id_, kind), f"{kind} request")
            if not waiter.done():
                logger.debug("waiting for the lock", extra={"kind": kind, "request": id_})
                spent = 0.0 if arrived is None else began - arrived
                await self._wait(waiter, kind, timeout, spent)
            granted = waiter.result()
        except BaseException as error:
            self._leave(id_, waiter)
            if not isinstance(error, RefusedError):
                self._metrics.left[kind] += 1
            raise
        finally:
            del self._waiters[id_]
        waited = time.monotonic() - began
        self._metrics.lock_wait[kind].observe(waited)
        return Grant(self, id_, kind, continued=granted.continued, waited=waited)

    def refuse(
        self,
        kind: Kind,
        reason: str,
        message: str,
        *,
        status: int = 503,
        retry_after: int | None = RETRY_AFTER,
    ) -> RefusedError:
        """Count a refusal and give it, to be raised."""
        self._metrics.refused[kind, reason] += 1
        return RefusedError(reason, message, retry_after, status)

    def reset(self) -> dict[str, Any]:
        """Force the lock to idle and let waiters go on; owners in flight no longer count.

        Returns:
            What was reset: the state, and how many requests held the lock.
        """
        before = self._arbiter.counts
        dropped, grants = self._arbiter.reset()
        logger.warning("lock reset by force", extra={"state": before.state, "held": len(dropped)})
        self._deliver(grants, "reset")
        return {"state": before.state, "released": len(dropped)}

    def close(self) -> None:
        """Refuse all that wait and all that come; what runs goes on."""
        self._closed = True
        counts = self._arbiter.counts
        logger.debug("closed", extra={"waiting": counts.waiting_llm + counts.waiting_image})
        for id_, kind in self._arbiter.close():
            self._waiters[id_].set_exception(self._shutdown(kind))

    async def _wait(self, waiter: _Waiter, kind: Kind, timeout: float, spent: float) -> None:
        """Wait for the grant; `spent` seconds of the time-out are over already."""
        counts = self._arbiter.counts
        if counts.waiting_llm + counts.waiting_image > self._max_queue:
            raise self.refuse(kind, "queue_full", "too many requests are waiting for the gpu")
        try:
            async with asyncio.timeout(max(timeout - spent, 0.0) if timeout else None):
                await waiter
        except TimeoutError:
            if waiter.cancelled():
                message = f"the gpu was not free within {timeout:g}s"
                raise self.refuse(kind, "timeout", message) from None
            # The answer came in the moment in which the time ended.

    def _leave(self, id_: int, waiter: _Waiter) -> None:
        """Take a request out again that will not use its grant."""
        if not waiter.granted:
            waiter.cancel()
        elif waiter.result().continued:
            self.on_abandoned(Grant(self, id_, Kind.IMAGE, continued=True, waited=0.0))
        else:
            self._release(id_)

    def _finish(self, id_: int) -> bool:
        answer = self._arbiter.finish(id_)
        self._deliver(answer.grants, "image handed over")
        return answer.handed_over

    def _release(self, id_: int) -> None:
        self._deliver(self._arbiter.release(id_), "released")

    def _shutdown(self, kind: Kind) -> RefusedError:
        return self.refuse(kind, "shutdown", "the proxy is shutting down")

    def _deliver(self, grants: list[ArbiterGrant], cause: str) -> None:
        """Wake the waiters of `grants`, then tell about a change of state."""
        for grant in grants:
            self._waiters[grant.id].set_result(grant)
            logger.debug("granted", extra={"kind": grant.kind, "request": grant.id})
        self._note(cause)

    def _note(self, cause: str) -> None:
        state = self._arbiter.state
        if state is self._state:
            return
        before, self._state = self._state, state
        self.transitions.append(Transition(time.time(), before, state, cause))
        counts = self._arbiter.counts
        logger.info(
            "state: %s",
            state.value,
            extra={
                "before": before,
                "cause": cause,
                "llm_inflight": counts.llm_inflight,
                "waiting_llm": counts.waiting_llm,
                "waiting_image": counts.waiting_image,
            },
        )
        if self._on_change is not None:
            try:
                self._on_change(state)
            except Exception:
                # Whoever is told must not cost a waiter its grant.
                logger.exception("a change of state was not taken note of")
