"""Who used the card when, and whether two kinds ever met on it."""

import threading
import time
from dataclasses import dataclass

from ocgpu.simulators import Usage

__all__ = ["Moment", "Oracle"]


@dataclass(frozen=True)
class Moment:
    """A change of one engine's use of the card.

    Attributes:
        at: `time.monotonic()`.
        kind: `llm` or `image`.
        resident_bytes: What that kind holds from now on.
        computing: How many of its computations run from now on.
    """

    at: float
    kind: str
    resident_bytes: int
    computing: int


class Oracle:
    """Watches the `Usage` of every engine.

    Attributes:
        moments: Every change, in order.
        computing_overlaps: Changes after which both kinds computed at once.
        resident_overlaps: Changes after which both kinds held memory at once.
    """

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.computing_overlaps: list[Moment] = []
        self.resident_overlaps: list[Moment] = []
        self._now: dict[str, Moment] = {}
        self._lock = threading.Lock()

    def watch(self, usage: Usage) -> None:
        """Follow `usage` from now on."""
        usage.watch = self._changed

    def uses(self, kind: str) -> int:
        """How often a computation of `kind` has begun."""
        counts = [moment.computing for moment in self.moments if moment.kind == kind]
        return sum(after > before for before, after in zip([0, *counts], counts, strict=False))

    def assert_exclusive(self) -> None:
        """Fail where two kinds ever computed or held memory at once."""
        assert not self.computing_overlaps, self._story(self.computing_overlaps[0])
        assert not self.resident_overlaps, self._story(self.resident_overlaps[0])

    def _changed(self, usage: Usage) -> None:
        moment = Moment(time.monotonic(), usage.kind, usage.resident_bytes, usage.computing)
        with self._lock:
            self.moments.append(moment)
            self._now[usage.kind] = moment
            now = self._now.values()
            if sum(other.computing > 0 for other in now) > 1:
                self.computing_overlaps.append(moment)
            if sum(other.resident_bytes > 0 for other in now) > 1:
                self.resident_overlaps.append(moment)

    def _story(self, last: Moment) -> str:
        end = self.moments.index(last) + 1
        return "two kinds on the card:\n" + "\n".join(map(str, self.moments[max(0, end - 8) : end]))
