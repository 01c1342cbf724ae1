"""The arbiter beside a second, naive telling of its rule; every event is checked against it.

The model keeps lists where the arbiter keeps sets, decides afresh from what waits, and counts the
row of images by what was granted. Beside the exact grants it checks what a user is promised, which
is said here without the rule.
"""

from ocgpu.server.arbiter import Arbiter, Kind, State

__all__ = ["ArbiterModel"]


class ArbiterModel:
    """Feeds an arbiter and knows what it has to say.

    Attributes:
        held: What is in flight, by number.
        waiting: What waits, in the order it came.
        ended: Numbers that were granted or left, and are gone.
        freeing: The image whose owner frees the card.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.arbiter = Arbiter(batch)
        self.held: dict[int, Kind] = {}
        self.waiting: list[tuple[int, Kind]] = []
        self.ended: list[int] = []
        self.freeing: int | None = None
        self.closed = False
        self._row = 0
        self._next = 1
        # Images granted since an LLM request began to wait.
        self._passed: dict[int, int] = {}

    def request(self, kind: Kind) -> None:
        number, self._next = self._next, self._next + 1
        self.waiting.append((number, kind))
        if kind is Kind.LLM:
            self._passed[number] = 0
        self._take(self.arbiter.request(number, kind))

    def request_again(self, number: int) -> None:
        try:
            self.arbiter.request(number, Kind.LLM)
        except ValueError:
            self._check()
            return
        raise AssertionError(f"took a number in use: {number}")

    def cancel(self, number: int) -> None:
        """Cancel; of one in flight or gone it does nothing."""
        self._remove_waiter(number)
        self._take(self.arbiter.cancel(number))

    def finish(self, number: int) -> None:
        """An owner asks whether to hand over; of anything but the image in flight it is no."""
        next_image = next((n for n, kind in self.waiting if kind is Kind.IMAGE), None)
        is_owner = self.held.get(number) is Kind.IMAGE
        evicting = any(kind is Kind.EVICTION for _, kind in self.waiting)
        ends = self.batch == 0 or self._full() or evicting
        hands_over = is_owner and next_image is not None and not ends

        answer = self.arbiter.finish(number)

        assert answer.handed_over is hands_over
        if not hands_over:
            assert answer.grants == []
            self.freeing = number if is_owner else self.freeing
            self._check()
            return
        assert answer.grants == [(next_image, Kind.IMAGE, True)]
        self._end(number)
        self._grant(answer.grants)
        self._check()

    def release(self, number: int) -> None:
        """Release; of one that waits or is gone it does nothing."""
        if number in self.held:
            self._end(number)
        self._take(self.arbiter.release(number))

    def reset(self) -> None:
        before = dict(self.held)
        for number in before:
            self._end(number)

        dropped, grants = self.arbiter.reset()

        assert sorted(dropped) == sorted(before)
        self._take(grants)

    def close(self) -> None:
        order = [Kind.EVICTION, Kind.IMAGE, Kind.LLM]
        assert self.arbiter.close() == sorted(self.waiting, key=lambda w: order.index(w[1]))
        self.ended += [number for number, _ in self.waiting]
        self.waiting.clear()
        self.closed = True
        self._check()

    def drain(self) -> None:
        """Let everything end; nobody may be left waiting."""
        while self.held:
            self.release(next(iter(self.held)))
        assert self.waiting == []

    def _full(self) -> bool:
        return 0 < self.batch <= self._row and any(k is Kind.LLM for _, k in self.waiting)

    def _expected(self) -> list[int]:
        images = [number for number, kind in self.waiting if kind is Kind.IMAGE]
        chats = [number for number, kind in self.waiting if kind is Kind.LLM]
        evictions = [number for number, kind in self.waiting if kind is Kind.EVICTION]
        kinds = set(self.held.values())
        if self.closed or kinds - {Kind.LLM}:
            return []
        if evictions:
            return [] if kinds else evictions[:1]
        if not images or (not kinds and self._full()):
            return chats
        return [] if kinds else images[:1]

    def _take(self, grants: list) -> None:
        """The grants that an event gave have to be those of the rule, in order."""
        assert [grant.id for grant in grants] == self._expected()
        assert not any(grant.continued for grant in grants)
        self._grant(grants)
        if not self.held and not self.closed:
            self._row = 0
        self._check()

    def _grant(self, grants: list) -> None:
        for grant in grants:
            assert (grant.id, grant.kind) in self.waiting, "granted to one who does not wait"
            first = next(n for n, kind in self.waiting if kind is grant.kind)
            assert first == grant.id, "not in the order they came"
            assert grant.id not in self.ended, "granted twice"
            self._remove_waiter(grant.id)
            self.ended.remove(grant.id)
            self.held[grant.id] = grant.kind
            if grant.kind is Kind.IMAGE:
                self._row += 1
                self._passed = {number: n + 1 for number, n in self._passed.items()}
            elif grant.kind is Kind.LLM:
                self._row = 0

    def _remove_waiter(self, number: int) -> None:
        before = len(self.waiting)
        self.waiting = [w for w in self.waiting if w[0] != number]
        if len(self.waiting) < before:
            self._passed.pop(number, None)
            self.ended.append(number)

    def _end(self, number: int) -> None:
        del self.held[number]
        self.ended.append(number)
        self.freeing = None if self.freeing == number else self.freeing

    def _check(self) -> None:
        """What a user is promised, whatever the rule says."""
        kinds = list(self.held.values())
        waiting = [kind for _, kind in self.waiting]
        assert len(set(kinds)) <= 1, "two kinds at one time"
        assert kinds.count(Kind.IMAGE) <= 1, "two images at one time"
        assert kinds.count(Kind.EVICTION) <= 1, "two evictions at one time"
        assert kinds or not waiting, "somebody waits for an idle card"
        if Kind.LLM in waiting:
            others = {Kind.IMAGE, Kind.EVICTION}
            assert others & {*kinds, *waiting}, "chats are held up by nobody"
        if self.batch:
            most = max(self._passed.values(), default=0)
            assert most <= self.batch, "more images than a batch before a chat that waits"
        counts = self.arbiter.counts
        evicting = Kind.EVICTION in kinds
        assert counts.evicting is evicting
        assert counts.state is (State(kinds[0].value) if kinds and not evicting else State.IDLE)
        assert all(self.arbiter.in_flight(number) for number in self.held)
        assert not any(self.arbiter.in_flight(number) for number, _ in self.waiting)
        assert counts.llm_inflight == kinds.count(Kind.LLM)
        assert counts.image_pending is (Kind.IMAGE in waiting)
        assert counts.waiting_llm == waiting.count(Kind.LLM)
        assert counts.waiting_image == waiting.count(Kind.IMAGE)
