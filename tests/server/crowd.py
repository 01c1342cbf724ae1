"""Clients of one `Admission` who come, wait, leave and end as dice say, and what must then hold."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from ocgpu.server.admission import Admission, Grant
from ocgpu.server.arbiter import Arbiter, Kind, State
from ocgpu.server.metrics import Metrics
from ocgpu.server.refusal import RefusedError

__all__ = ["MAX_QUEUE", "Crowd"]

MAX_QUEUE = 5
MEMORY = 1000


@dataclass(eq=False)
class Client:
    """One request.

    Attributes:
        go: Set when it is to end.
        grant: What it was granted, while it counts.
        asks: Whether an image asks to hand over before it frees.
        waits: Whether it asked for the lock and has no answer yet.
    """

    kind: Kind
    asks: bool
    waits: bool = False
    task: "asyncio.Task[None] | None" = None
    go: asyncio.Event = field(default_factory=asyncio.Event)
    grant: Grant | None = None


# An eviction is the server's own and counted nowhere; test_admission has it.
REQUESTS = (Kind.LLM, Kind.IMAGE)


class Crowd:
    """Plays random events and checks after each what must hold.

    Attributes:
        outcomes: How requests ended.
        failures: What broke inside a request.
    """

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.metrics = Metrics()
        self.admission = Admission(
            Arbiter(dice.choice((0, 1, 2, 8))),
            self.metrics,
            max_queue=MAX_QUEUE,
            max_waiting_bytes=MEMORY,
        )
        self.admission.on_abandoned = self._abandoned
        self.clients: list[Client] = []
        self.on_card: list[Client] = []
        self.outcomes: Counter[str] = Counter()
        self.failures: list[BaseException | None] = []
        self.started = 0

    def come(self) -> None:
        kind = self.dice.choice(REQUESTS)
        client = Client(kind, asks=self.dice.random() < 0.7)
        timeout = self.dice.choice((0.0, 0.0, 0.001, 1.0, 5.0))
        self._begin(client, self._live(client, timeout))

    def leave(self) -> None:
        if self.clients:
            task = self.dice.choice(self.clients).task
            assert task is not None
            task.cancel()

    def end(self) -> None:
        if self.on_card:
            self.dice.choice(self.on_card).go.set()

    def reset(self) -> None:
        held = self.admission.counts
        answer = self.admission.reset()
        assert answer["released"] == (held.llm_inflight or held.state is State.IMAGE)
        # Their grants are void: whoever holds one still runs, but no longer counts.
        for client in self.on_card:
            client.go.set()
        self.on_card.clear()

    async def end_all(self) -> None:
        """Let everything end."""
        for _ in range(1000):
            if not self.clients:
                return
            for client in list(self.on_card):
                client.go.set()
            await asyncio.sleep(1.0)
        raise AssertionError(f"somebody waits for ever: {self.admission.counts}")

    def check(self) -> None:
        """What holds whenever nothing can go on by itself."""
        assert self.failures == []
        counts = self.admission.counts
        kinds = [client.kind for client in self.on_card]
        assert len(set(kinds)) <= 1, "two kinds at one time"
        assert kinds.count(Kind.IMAGE) <= 1, "two images at one time"
        assert counts.llm_inflight == kinds.count(Kind.LLM)
        assert (counts.state is State.IMAGE) is (Kind.IMAGE in kinds)
        assert counts.waiting_llm + counts.waiting_image <= MAX_QUEUE
        waits = sum(client.waits for client in self.clients)
        assert waits == counts.waiting_llm + counts.waiting_image
        assert len(self.admission._waiters) == waits, "a waiter leaked"
        if not kinds:
            assert waits == 0, "somebody waits for an idle card"

    def check_end(self) -> None:
        """What holds when all is over."""
        assert self.failures == []
        assert self.admission.counts == (State.IDLE, 0, False, 0, 0, False)
        assert self.admission.waiting_bytes == 0
        assert self.admission._waiters == {}
        granted = sum(
            int(value)
            for kind in REQUESTS
            for suffix, _, value in self.metrics.lock_wait[kind].samples({})
            if suffix == "_count"
        )
        assert granted == self.outcomes["granted"]
        assert sum(self.metrics.refused.values()) == self.outcomes["refused"]
        assert sum(self.metrics.left.values()) == self.outcomes["left"]
        assert self.outcomes.total() == self.started

    async def _live(self, client: Client, timeout: float) -> None:
        self.started += 1
        reservation = self.admission.reserve(client.kind)
        try:
            for _ in range(self.dice.randrange(3)):
                reservation.grow(self.dice.randrange(200))
                await asyncio.sleep(self.dice.choice((0, 0, 0.5)))
            client.waits = True
            client.grant = await self._acquire(client.kind, timeout)
            client.waits = False
            await self._work(client, client.grant)
        except RefusedError:
            self.outcomes["refused"] += 1
        except asyncio.CancelledError:
            if client.grant is None:
                self.outcomes["left" if client.waits else "gone"] += 1
        finally:
            reservation.release()

    async def _acquire(self, kind: Kind, timeout: float) -> Grant:
        counts = self.admission.counts
        free = counts.state is State.IDLE
        if kind is Kind.LLM:
            free = counts.state is not State.IMAGE and not counts.image_pending
        full = not free and counts.waiting_llm + counts.waiting_image >= MAX_QUEUE
        closed = self.admission.closed
        try:
            grant = await self.admission.acquire(kind, timeout=timeout)
        except RefusedError as refusal:
            expected = {"queue_full"} if full else {"shutdown", "timeout" if timeout else ""}
            expected = {"shutdown"} if closed else expected
            if refusal.reason not in expected:
                self.failures.append(refusal)
            raise
        assert not full, "the queue took more than it may"
        assert not closed
        self.outcomes["granted"] += 1
        return grant

    async def _work(self, client: Client, grant: Grant) -> None:
        with grant:
            try:
                self._take_card(client, grant)
                await client.go.wait()
                if client.kind is Kind.IMAGE and client.asks and grant.finish():
                    assert client in self.on_card, "handed over what was reset"
                    return
                # Here the card is freed.
                await asyncio.sleep(self.dice.choice((0, 0.5)))
            finally:
                if client in self.on_card:
                    self.on_card.remove(client)

    def _take_card(self, client: Client, grant: Grant) -> None:
        arbiter = self.admission._arbiter
        if grant._id != arbiter._image and grant._id not in arbiter._llm:
            # Reset between its grant and this moment.
            client.go.set()
            return
        self.on_card.append(client)
        kinds = [other.kind for other in self.on_card]
        assert len(set(kinds)) == 1, "two kinds at one time"
        assert kinds.count(Kind.IMAGE) <= 1, "two images at one time"

    def _abandoned(self, grant: Grant) -> None:
        """A card handed over to one who left: somebody of our own frees it."""
        assert grant.continued
        client = Client(Kind.IMAGE, asks=True, grant=grant)
        client.go.set()
        self._begin(client, self._work(client, grant))

    def _begin(self, client: Client, life: Coroutine[Any, Any, None]) -> None:
        self.clients.append(client)
        client.task = asyncio.ensure_future(life)
        client.task.add_done_callback(lambda task: self._over(client, task))

    def _over(self, client: Client, task: "asyncio.Task[None]") -> None:
        self.clients.remove(client)
        if not task.cancelled() and task.exception() is not None:
            self.failures.append(task.exception())
