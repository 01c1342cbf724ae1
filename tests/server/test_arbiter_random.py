"""The arbiter under random events, beside a naive telling of its rule."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ocgpu.server.arbiter import Kind
from tests.server.arbiter_model import ArbiterModel

EVENTS = 10_000
EVENT_NAMES = (
    "llm", "image", "eviction", "cancel", "finish", "release", "free", "stray", "reset"
)  # fmt: skip
# Longer queues make a run slow and show nothing new.
WAITING_MAX = 30


def play(model: ArbiterModel, dice: random.Random, event: str) -> None:
    """Play one event; one that has nobody to play on is a request."""
    waiting = [number for number, _ in model.waiting]
    images = [number for number, kind in model.held.items() if kind is Kind.IMAGE]
    if event == "cancel" and waiting:
        model.cancel(dice.choice(waiting))
    elif event == "finish" and images:
        model.finish(images[0])
    elif event == "free" and model.freeing is not None:
        model.release(model.freeing)
    elif event == "release" and model.held:
        model.release(dice.choice(list(model.held)))
    elif event == "reset":
        model.reset()
    elif event == "stray":
        stray(model, dice)
    elif event in ("llm", "image", "eviction") and len(waiting) < WAITING_MAX:
        model.request(Kind(event))


def stray(model: ArbiterModel, dice: random.Random) -> None:
    """An event about a number that it does not fit: gone, unknown, granted, or waiting."""
    waiting = [number for number, _ in model.waiting]
    play_it = dice.choice([model.cancel, model.finish, model.release])
    play_it(dice.choice([0, *model.ended[-5:]]))
    if model.held:
        model.cancel(dice.choice(list(model.held)))
    if waiting:
        model.release(dice.choice(waiting))
        model.finish(dice.choice(waiting))
    if model.held or waiting:
        model.request_again(dice.choice([*model.held, *waiting]))


@pytest.mark.parametrize("seed", range(12))
def test_a_hundred_thousand_random_events_follow_the_rule(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - a test's dice
    model = ArbiterModel((0, 1, 2, 8)[seed % 4])

    for number in range(EVENTS):
        if number % 500 == 0:
            # Another mix of traffic, so that queues grow and run dry by turns.
            weights = [dice.random() for _ in EVENT_NAMES[:-1]] + [0.02]
        event = dice.choices(EVENT_NAMES, weights)[0]
        try:
            play(model, dice, event)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, event {number} ({event}): {error}") from error

    model.drain()


@pytest.mark.parametrize("seed", range(200))
def test_after_close_in_any_phase_what_runs_ends_and_nothing_is_granted(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - a test's dice
    model = ArbiterModel((0, 1, 2, 8)[seed % 4])
    for _ in range(dice.randrange(60)):
        play(model, dice, dice.choice(EVENT_NAMES))

    model.close()

    for _ in range(20):
        play(model, dice, dice.choice(("cancel", "finish", "release", "free", "stray", "reset")))
    with pytest.raises(ValueError, match="closed, no request may come"):
        model.arbiter.request(10**9, Kind.LLM)
    model.drain()


class Events(RuleBasedStateMachine):
    """Hypothesis chooses the events, and shrinks what breaks a promise to the shortest story."""

    @initialize(batch=st.integers(0, 3))
    def begin(self, batch: int) -> None:
        self.model = ArbiterModel(batch)

    @precondition(lambda self: not self.model.closed)
    @rule(kind=st.sampled_from(Kind))
    def request(self, kind: Kind) -> None:
        self.model.request(kind)

    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        self.model.cancel(self._one_of([n for n, _ in self.model.waiting], which))

    @rule(which=st.integers(0, 1000))
    def release(self, which: int) -> None:
        self.model.release(self._one_of(list(self.model.held), which))

    @rule(which=st.integers(0, 1000))
    def finish(self, which: int) -> None:
        self.model.finish(self._one_of(list(self.model.held), which))

    @rule(which=st.integers(0, 1000))
    def too_late(self, which: int) -> None:
        gone = self._one_of(self.model.ended, which)
        self.model.finish(gone)
        self.model.release(gone)
        self.model.cancel(gone)

    @rule()
    def reset(self) -> None:
        self.model.reset()

    @rule()
    def close(self) -> None:
        self.model.close()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.drain()

    @staticmethod
    def _one_of(numbers: list[int], which: int) -> int:
        return numbers[which % len(numbers)] if numbers else 0


TestEvents = pytest.mark.timeout(60)(Events.TestCase)
# No database: a test leaves no file. Derandomised: a failure is the same on every machine.
TestEvents.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
