"""The waiting around the arbiter: futures, time-outs, bounds, and one owned grant per request.

All of it runs on one event loop, and no `await` stands between a decision of the arbiter and its
bookkeeping here, so no lock is needed. `asyncio.timeout` and never `wait_for`: on Python 3.11
`wait_for` can swallow the cancellation of a client that leaves in the same moment.
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
    """The request gets a 503.

    Attributes:
        reason: One word for programs: `timeout`, `queue_full`, `body_memory`, `shutdown`.
        message: What a person reads.
        retry_after: Seconds, for `Retry-After`.
    """

    def __init__(self, reason: str, message: str, retry_after: int = RETRY_AFTER) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


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
    """Memory that the body of one waiting request takes out of `MAX_WAITING_BYTES`."""

    __slots__ = ("_admission", "_size")

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self._size = 0

    def grow(self, size: int) -> None:
        """Take `size` more bytes.

        Raises:
            RefusedError: All waiting bodies together would be larger than allowed.
        """
        admission = self._admission
        if admission.waiting_bytes + size > admission.max_waiting_bytes:
            raise RefusedError("body_memory", "too many request bodies are waiting for the gpu")
        admission.waiting_bytes += size
        self._size += size

    def release(self) -> None:
        """Give all of it back. Twice is harmless."""
        self._admission.waiting_bytes -= self._size
        self._size = 0


class Admission:
    """Lets requests wait for the arbiter's grant, and for nothing longer than they may.

    Args:
        arbiter: The rule; nobody else may feed it.
        metrics: Takes the seconds of every wait.
        max_queue: Requests that may wait at one time.
        max_waiting_bytes: Bytes that the bodies of waiting requests may take together.
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
        self._waiters: dict[int, asyncio.Future[ArbiterGrant]] = {}
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

    def reserve(self) -> BodyReservation:
        """Begin to account for the body of a request that is going to wait."""
        return BodyReservation(self)

    async def acquire(self, kind: Kind, *, timeout: float = 0.0) -> Grant:
        """Wait for the lock.

        A cancelled wait leaves nothing behind, whatever the phase: a waiter is removed, and a
        grant that came in the same moment is given back.

        Args:
            kind: What the card is wanted for.
            timeout: Seconds to wait at most; 0 is no limit.

        Raises:
            RefusedError: The queue is full, the time is over, or the server shuts down.
        """
        if self._closed:
            raise _shutdown()
        id_ = next(self._ids)
        began = time.monotonic()
        waiter: asyncio.Future[ArbiterGrant] = asyncio.get_running_loop().create_future()
        self._waiters[id_] = waiter
        self._deliver(self._arbiter.request(id_, kind), f"{kind} request")
        try:
            if not waiter.done():
                self._check_queue()
                logger.debug("waiting for the lock", extra={"kind": kind, "request": id_})
                async with asyncio.timeout(timeout or None):
                    await waiter
            granted = waiter.result()
        except TimeoutError:
            self._leave(id_, waiter)
            message = f"the gpu was not free within {timeout:g}s"
            raise RefusedError("timeout", message) from None
        except BaseException:
            self._leave(id_, waiter)
            raise
        finally:
            self._waiters.pop(id_, None)
            waited = time.monotonic() - began
            self._metrics.lock_wait[kind].observe(waited)
        return Grant(self, id_, kind, continued=granted.continued, waited=waited)

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
        for id_ in self._arbiter.close():
            waiter = self._waiters.get(id_)
            if waiter is not None and not waiter.done():
                waiter.set_exception(_shutdown())

    def _check_queue(self) -> None:
        if len(self._waiters) > self._max_queue:
            raise RefusedError("queue_full", "too many requests are waiting for the gpu")

    def _leave(self, id_: int, waiter: "asyncio.Future[ArbiterGrant]") -> None:
        """Take a request out again that will not use its grant."""
        granted = waiter.done() and not waiter.cancelled() and waiter.exception() is None
        if granted and waiter.result().continued:
            self.on_abandoned(Grant(self, id_, Kind.IMAGE, continued=True, waited=0.0))
        elif granted:
            self._release(id_)
        else:
            waiter.cancel()
            self._deliver(self._arbiter.cancel(id_), "waiter left")

    def _finish(self, id_: int) -> bool:
        for other, waiter in self._waiters.items():
            if waiter.cancelled():
                # It is about to leave; handing over to it would leave the card to nobody.
                self._arbiter.cancel(other)
        answer = self._arbiter.finish(id_)
        self._deliver(answer.grants, "image handed over")
        return answer.handed_over

    def _release(self, id_: int) -> None:
        self._deliver(self._arbiter.release(id_), "released")

    def _deliver(self, grants: list[ArbiterGrant], cause: str) -> None:
        """Wake the waiters of `grants`, then tell about a change of state."""
        lost = []
        for grant in grants:
            waiter = self._waiters.get(grant.id)
            if waiter is None or waiter.done():
                lost.append(grant.id)
            else:
                waiter.set_result(grant)
            logger.debug("granted", extra={"kind": grant.kind, "request": grant.id})
        for id_ in lost:
            # Its task was cancelled in this turn of the loop: nobody is there to release it.
            self._deliver(self._arbiter.release(id_), "waiter left")
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
            self._on_change(state)


def _shutdown() -> RefusedError:
    return RefusedError("shutdown", "the proxy is shutting down")
