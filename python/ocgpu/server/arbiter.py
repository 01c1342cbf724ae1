"""The two-mode lock of `ocgpu serve`, as a pure state machine: events in, grants out.

It reads no clock, does no I/O and knows no event loop, so every rule is tested by calling it; the
shell in `admission` does the waiting. Every event returns the grants that it causes, and a grant
counts from that moment on: the shell releases it if its waiter is gone.

| state | in flight           | event         | next state                                        |
|-------|---------------------|---------------|---------------------------------------------------|
| idle  | nothing             | request llm   | llm                                               |
| idle  | nothing             | request image | image                                             |
| llm   | n >= 1 LLM requests | request llm   | llm, n + 1; waits while an image is pending       |
| llm   | n >= 1 LLM requests | request image | llm; the image is pending and granted at n = 0    |
| llm   | n >= 1 LLM requests | cancel llm    | llm                                               |
| llm   | n >= 1 LLM requests | cancel image  | llm; with no image left, n + all LLM that wait    |
| llm   | n >= 1 LLM requests | release       | llm, n - 1; at n = 0 the next image, else idle    |
| image | one image job       | request       | image; it waits                                   |
| image | one image job       | cancel        | image                                             |
| image | one image job       | finish        | image: handed over to the next one, or unchanged  |
| image | one image job       | release       | the eviction that waits, else llm with all that   |
|       |                     |               | wait where the row is full, else the next image,  |
|       |                     |               | else llm, else idle                               |
| any   |                     | request evict.| waits behind what is in flight, ahead of all else |
| idle  | one eviction        | request       | idle; it waits                                    |
| idle  | one eviction        | release       | as the release of an image                        |
| any   |                     | reset         | as if all in flight were released at once         |
| any   |                     | close         | unchanged; waiters are dropped, nothing is granted|

Nobody waits in state idle but behind an eviction, and in state llm nobody but behind a pending
image or eviction. `finish` leaves the state alone where there is no other image, where an eviction
waits, where the row is full, and with `image_batch` 0.

Images go first (writer preference) and in the order they came. Against starvation of the LLM side,
a row of images is full after `image_batch` of them: then all LLM requests that wait at that moment
go before the next image. The row counts every image since the card was last idle or the LLM side's,
so that a chat that comes late in a long row waits for one image and not for a whole batch more; it
has no end while no LLM request waits. `finish` is the batching rule: the owner asks it when a job
has ended, before it spends time on freeing the card, and the next image takes over a card that is
already prepared.
"""

from enum import StrEnum
from typing import Final, NamedTuple

__all__ = ["Arbiter", "Counts", "Finish", "Grant", "Kind", "State"]


class Kind(StrEnum):
    """What a request wants of the card."""

    LLM = "llm"
    IMAGE = "image"
    # To empty the card, for somebody outside or by hand: alone, and ahead of all that wait.
    EVICTION = "eviction"


class State(StrEnum):
    """What the card is used for."""

    IDLE = "idle"
    LLM = "llm"
    IMAGE = "image"


class Grant(NamedTuple):
    """One request that may go now.

    Attributes:
        id: The request's own number.
        kind: What was granted.
        continued: An image that follows an image directly: the LLM side is unloaded already.
    """

    id: int
    kind: Kind
    continued: bool = False


class Finish(NamedTuple):
    """Answer to `Arbiter.finish`.

    Attributes:
        handed_over: The lock went to the next image; the owner must neither free nor release.
        grants: The next image, or nothing.
    """

    handed_over: bool
    grants: list[Grant]


class Counts(NamedTuple):
    """The lock as a reader sees it."""

    state: State
    llm_inflight: int
    image_pending: bool
    waiting_llm: int
    waiting_image: int
    evicting: bool = False


class Arbiter:
    """Grants one kind of work at a time: any number of LLM requests, or exactly one image job.

    A request is named by a number that its caller chooses and never uses again. Events about a
    number that is not known (released before, reset, cancelled) do nothing, and so does a cancel
    of one that was granted: that one is to be released.

    Args:
        image_batch: Images in a row while an LLM request waits; 0 keeps image priority absolute
            and frees after every job.
    """

    def __init__(self, image_batch: int) -> None:
        self._batch: Final = image_batch
        self._llm: set[int] = set()
        self._image: int | None = None
        self._eviction: int | None = None
        # Ordered sets: a waiter that leaves is removed without a search.
        self._waiting_llm: dict[int, None] = {}
        self._waiting_images: dict[int, None] = {}
        self._waiting_evictions: dict[int, None] = {}
        self._row = 0
        self._closed = False

    @property
    def counts(self) -> Counts:
        """State and numbers, for health, metrics and logs."""
        return Counts(
            self.state,
            len(self._llm),
            bool(self._waiting_images),
            len(self._waiting_llm),
            len(self._waiting_images),
            self._eviction is not None,
        )

    @property
    def state(self) -> State:
        """`image` or `llm` while one is in flight, else `idle`: also while the card is emptied."""
        if self._image is not None:
            return State.IMAGE
        return State.LLM if self._llm else State.IDLE

    def request(self, id_: int, kind: Kind) -> list[Grant]:
        """A request arrives; it is in the grants if it may go at once.

        Raises:
            ValueError: The number is in use, or the arbiter is closed.
        """
        if self._closed:
            raise ValueError(f"closed, no request may come: {id_}")
        if self._knows(id_):
            raise ValueError(f"request number in use: {id_}")
        self._waiting(kind)[id_] = None
        return self._grant()

    def cancel(self, id_: int) -> list[Grant]:
        """A waiter leaves. What it held up may go."""
        for kind in Kind:
            if id_ in self._waiting(kind):
                del self._waiting(kind)[id_]
                return self._grant()
        return []

    def finish(self, id_: int) -> Finish:
        """An image job has ended; decide whether its owner frees the card or hands it over as is.

        Not handed over means: free, then `release`.
        """
        row_ended = self._row >= self._batch and bool(self._waiting_llm)
        stops = row_ended or bool(self._waiting_evictions) or self._batch == 0
        if self._image != id_ or not self._waiting_images or stops:
            return Finish(handed_over=False, grants=[])
        return Finish(handed_over=True, grants=[self._next_image(continued=True)])

    def release(self, id_: int) -> list[Grant]:
        """A granted request has ended."""
        if id_ == self._image:
            self._image = None
        elif id_ == self._eviction:
            self._eviction = None
        elif id_ in self._llm:
            self._llm.discard(id_)
        else:
            return []
        return self._grant()

    def reset(self) -> tuple[list[int], list[Grant]]:
        """Forget all that is in flight; their later releases do nothing.

        Returns:
            The numbers that were in flight, and the grants that follow.
        """
        dropped = sorted(self._llm)
        dropped += [id_ for id_ in (self._image, self._eviction) if id_ is not None]
        self._llm.clear()
        self._image = self._eviction = None
        return dropped, self._grant()

    def close(self) -> list[tuple[int, Kind]]:
        """Grant nothing any more; return those that wait."""
        self._closed = True
        order = (Kind.EVICTION, Kind.IMAGE, Kind.LLM)
        waiting = [(id_, kind) for kind in order for id_ in self._waiting(kind)]
        for kind in order:
            self._waiting(kind).clear()
        return waiting

    def in_flight(self, id_: int) -> bool:
        """Whether a request was granted and has not ended."""
        return id_ in (self._image, self._eviction) or id_ in self._llm

    def _waiting(self, kind: Kind) -> dict[int, None]:
        if kind is Kind.LLM:
            return self._waiting_llm
        return self._waiting_images if kind is Kind.IMAGE else self._waiting_evictions

    def _knows(self, id_: int) -> bool:
        waits = id_ in self._waiting_llm or id_ in self._waiting_images
        return waits or id_ in self._waiting_evictions or self.in_flight(id_)

    def _grant(self) -> list[Grant]:
        """Apply the grant rule once; called after every change. Closed, nobody waits for it."""
        if self._image is not None or self._eviction is not None:
            return []
        if self._waiting_evictions:
            return [] if self._llm else [self._next_eviction()]
        if self._waiting_images:
            if self._llm:
                return []
            if self._batch and self._row >= self._batch and self._waiting_llm:
                return self._all_llm()
            return [self._next_image(continued=False)]
        if self._waiting_llm:
            return self._all_llm()
        if not self._llm:
            # An idle card had room for everybody: the row of images ends here.
            self._row = 0
        return []

    def _next_eviction(self) -> Grant:
        self._eviction = next(iter(self._waiting_evictions))
        del self._waiting_evictions[self._eviction]
        return Grant(self._eviction, Kind.EVICTION)

    def _all_llm(self) -> list[Grant]:
        self._row = 0
        ids = list(self._waiting_llm)
        self._waiting_llm.clear()
        self._llm.update(ids)
        return [Grant(id_, Kind.LLM) for id_ in ids]

    def _next_image(self, *, continued: bool) -> Grant:
        id_ = next(iter(self._waiting_images))
        del self._waiting_images[id_]
        self._image = id_
        self._row += 1
        return Grant(id_, Kind.IMAGE, continued)
