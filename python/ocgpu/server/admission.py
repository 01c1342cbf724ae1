"""The waiting around the arbiter: futures, time-outs, bounds, and one owned grant per request.

All of it runs on one event loop, and no `await` stands between a decision of the arbiter and its
bookkeeping here, so no lock is needed. `asyncio.timeout` and never `wait_for`: on Python 3.11
`wait_for` can swallow the cancellation of a client that leaves in the same moment.

A cancelled task runs again only in the loop's next turn, and until then the arbiter would grant to
it or let it hold others up. So the future that it waits on takes it out of the queue in the moment
of the cancellation, and the arbiter knows live waiters only.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self

from ocgpu.server.arbiter import Arbiter, Counts, Kind, State
from ocgpu.server.arbiter import Grant as ArbiterGrant
from ocgpu.server.metrics import Metrics
from ocgpu.server.refusal import RETRY_AFTER, RefusedError
from ocgpu.server.reservation import BodyReservation

__all__ = ["Admission", "Grant", "Transition"]

logger: Final = logging.getLogger("ocgpu.server")

_HISTORY: Final = 200


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

    @property
    def held(self) -> bool:
        """Whether it counts: it was neither released nor reset."""
        return self._admission._holds(self._id)  # as above

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count as one who waits meanwhile: for the card itself, which somebody outside has."""
        self._admission._pause(self._id, self.kind)  # as above
        try:
            yield
        finally:
            self._admission._resume(self._id)  # as above

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


class CardLease(Protocol):
    """The machine's lease, as far as LLM requests need it."""

    def try_share(self) -> bool:
        """Hold it shared if that needs no wait; whether it is."""

    async def share(self) -> None:
        """Wait until it is held shared.

        Raises:
            RefusedError: Another holder did not give it up in time, or it cannot be used.
        """


class Admission:
    """Lets requests wait for the arbiter's grant, and for nothing longer than they may.

    Args:
        arbiter: The rule; nobody else may feed it.
        metrics: Takes the seconds of every wait that ended in a grant, and counts the others.
        max_queue: Requests that may wait at one time.
        max_waiting_bytes: Bytes that the bodies of locked requests may take together, from their
            first byte to the end of the request.
        on_change: Called after every change of state, with the new state.
        lease: Taken for every LLM request; None takes none.
    """

    def __init__(
        self,
        arbiter: Arbiter,
        metrics: Metrics,
        *,
        max_queue: int,
        max_waiting_bytes: int,
        on_change: Callable[[State], None] | None = None,
        lease: CardLease | None = None,
    ) -> None:
        self._arbiter = arbiter
        self._metrics = metrics
        self._max_queue = max_queue
        self.max_waiting_bytes = max_waiting_bytes
        self.waiting_bytes = 0
        self._on_change = on_change
        self._lease = lease
        # Takes a lock that was handed over, with a card that is not freed, to one who just left.
        self.on_abandoned: Callable[[Grant], None] = Grant.release
        # Grants so far, for who wants to know whether one came in between.
        self.granted = 0
        self._ids = itertools.count(1)
        self._waiters: dict[int, _Waiter] = {}
        # Granted by the arbiter, and waiting for the machine's lease.
        self._paused: dict[int, Kind] = {}
        self._closed = False
        self._state = State.IDLE
        self.transitions: deque[Transition] = deque(maxlen=_HISTORY)

    @property
    def counts(self) -> Counts:
        """The lock as it is now; who waits for the machine's lease counts as waiting."""
        counts = self._arbiter.counts
        if not self._paused:
            return counts
        images = sum(kind is Kind.IMAGE for kind in self._paused.values())
        chats = sum(kind is Kind.LLM for kind in self._paused.values())
        running = counts.llm_inflight - chats
        return counts._replace(
            state=State.LLM if running else State.IDLE,
            llm_inflight=running,
            image_pending=counts.image_pending or images > 0,
            waiting_llm=counts.waiting_llm + chats,
            waiting_image=counts.waiting_image + images,
        )

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
            if kind is Kind.LLM and self._lease is not None and not self._lease.try_share():
                await self._share(id_, self._lease)
        except BaseException as error:
            self._leave(id_, waiter)
            if not isinstance(error, RefusedError):
                self._metrics.count_left(kind)
            raise
        finally:
            del self._waiters[id_]
        waited = time.monotonic() - began
        self._metrics.observe_wait(kind, waited)
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
        self._metrics.count_refused(kind, reason)
        return RefusedError(reason, message, retry_after, status)

    def reset(self) -> dict[str, Any]:
        """Force the lock to idle and let waiters go on; owners in flight no longer count.

        Returns:
            What was reset: the state, and how many requests held the lock.
        """
        before = self._arbiter.counts
        dropped, grants = self._arbiter.reset()
        self._paused.clear()
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
        self._check_queue(kind)
        try:
            async with asyncio.timeout(max(timeout - spent, 0.0) if timeout else None):
                await waiter
        except TimeoutError:
            if waiter.cancelled():
                message = f"the gpu was not free within {timeout:g}s"
                raise self.refuse(kind, "timeout", message) from None
            # The answer came in the moment in which the time ended.

    async def _share(self, id_: int, lease: CardLease) -> None:
        """Wait for the machine's lease on behalf of an LLM request that the arbiter has granted."""
        self._pause(id_, Kind.LLM)
        try:
            self._check_queue(Kind.LLM)
            await lease.share()
        except RefusedError as refusal:
            if refusal.reason == "lease":
                self._metrics.count_refused(Kind.LLM, refusal.reason)
            raise
        finally:
            self._resume(id_)

    def _check_queue(self, kind: Kind) -> None:
        counts = self.counts
        if counts.waiting_llm + counts.waiting_image > self._max_queue:
            raise self.refuse(kind, "queue_full", "too many requests are waiting for the gpu")

    def _holds(self, id_: int) -> bool:
        return self._arbiter.in_flight(id_)

    def _pause(self, id_: int, kind: Kind) -> None:
        if self._arbiter.in_flight(id_):
            self._paused[id_] = kind
            self._note("waits for the machine's lease")

    def _resume(self, id_: int) -> None:
        if self._paused.pop(id_, None) is not None:
            self._note("has the machine's lease")

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
        self._paused.pop(id_, None)
        self._deliver(self._arbiter.release(id_), "released")

    def _shutdown(self, kind: Kind) -> RefusedError:
        return self.refuse(kind, "shutdown", "the proxy is shutting down")

    def _deliver(self, grants: list[ArbiterGrant], cause: str) -> None:
        """Wake the waiters of `grants`, then tell about a change of state."""
        self.granted += len(grants)
        for grant in grants:
            self._waiters[grant.id].set_result(grant)
        if grants and logger.isEnabledFor(logging.DEBUG):
            for grant in grants:
                logger.debug("granted", extra={"kind": grant.kind, "request": grant.id})
        self._note(cause)

    def _note(self, cause: str) -> None:
        if not self._paused and self._arbiter.state is self._state:
            return
        counts = self.counts
        state = counts.state
        if state is self._state:
            return
        before, self._state = self._state, state
        self.transitions.append(Transition(time.time(), before, state, cause))
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
