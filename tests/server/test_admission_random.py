"""Waiting for the lock under random events, and cancelled at every point where it can be."""

import asyncio
import itertools
import random

import pytest

from ocgpu.server.admission import Admission, Grant
from ocgpu.server.arbiter import Arbiter, Kind, State
from ocgpu.server.metrics import Metrics
from ocgpu.server.refusal import RefusedError
from tests.server.crowd import Crowd
from tests.server.instant import run_instantly, settle

EVENTS = 600
TURNS = range(4)
WHAT_HAPPENS = ("release", "finish", "timeout", "close", "reset", "nothing")


@pytest.mark.parametrize("seed", range(12))
def test_a_random_crowd_leaves_nothing_behind(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - a test's dice

    async def play() -> None:
        crowd = Crowd(dice)
        closing = EVENTS - 100 if seed % 3 == 0 else None
        for number in range(EVENTS):
            event = dice.choices(("come", "leave", "end", "reset"), (8, 3, 6, 0.1))[0]
            getattr(crowd, event)()
            if number == closing:
                crowd.admission.close()
            # Nothing, one turn, a moment of quiet, or some time passes.
            pause = dice.choices(("none", "turn", "settle", "time"), (4, 4, 4, 2))[0]
            if pause == "turn":
                await asyncio.sleep(0)
            elif pause == "time":
                await asyncio.sleep(dice.choice((0.001, 0.3, 2.0)))
            if pause in ("settle", "time"):
                await settle()
                crowd.check()
        await crowd.end_all()
        crowd.check_end()
        assert crowd.outcomes["granted"] > EVENTS / 20

    try:
        run_instantly(play)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("what", WHAT_HAPPENS)
def test_a_wait_that_is_cancelled_at_any_point_leaves_nothing_behind(kind: Kind, what: str) -> None:
    for cancel_at, event_at, first in itertools.product(TURNS, TURNS, (False, True)):
        story = Story(kind, what, cancel_at, event_at, cancel_first=first)
        try:
            run_instantly(story.play)
        except AssertionError as error:
            raise AssertionError(f"{vars(story)}: {error}") from error


class Story:
    """One waiter who is cancelled in one turn of the loop, while something happens in another."""

    def __init__(
        self, kind: Kind, what: str, cancel_at: int, event_at: int, *, cancel_first: bool
    ) -> None:
        self.kind = kind
        self.what = what
        self.cancel_at = cancel_at
        self.event_at = event_at
        self.cancel_first = cancel_first

    async def play(self) -> None:
        admission = Admission(Arbiter(8), Metrics(), max_queue=2, max_waiting_bytes=0)
        abandoned: list[Grant] = []
        admission.on_abandoned = abandoned.append
        holder = await admission.acquire(Kind.IMAGE)
        timeout = 1.0 if self.what == "timeout" else 0.0
        waiter = asyncio.ensure_future(admission.acquire(self.kind, timeout=timeout))
        behind = asyncio.ensure_future(admission.acquire(Kind.LLM))

        for turn in TURNS:
            if turn == self.cancel_at and self.cancel_first:
                waiter.cancel()
            if turn == self.event_at:
                await self._happen(admission, holder)
            if turn == self.cancel_at and not self.cancel_first:
                waiter.cancel()
            await asyncio.sleep(0)
        await settle()

        assert waiter.done(), "a wait that was cancelled goes on"
        assert waiter.cancelled() or self.what != "nothing"
        give_back(waiter)
        for grant in (*abandoned, holder):
            grant.release()
        await settle()
        assert behind.done(), "a grant is lost"
        give_back(behind)
        assert admission.counts == (State.IDLE, 0, False, 0, 0, False)
        assert admission._waiters == {}

    async def _happen(self, admission: Admission, holder: Grant) -> None:
        handed_over = self.what == "finish" and holder.finish()
        if self.what in ("release", "finish") and not handed_over:
            holder.release()
        elif self.what == "timeout":
            await asyncio.sleep(1.0)
        elif self.what == "close":
            admission.close()
        elif self.what == "reset":
            admission.reset()


def give_back(waiter: "asyncio.Task[Grant]") -> None:
    if not waiter.cancelled() and waiter.exception() is None:
        waiter.result().release()


@pytest.mark.parametrize("number", [250])
async def test_waiters_that_are_cancelled_are_gone_at_once(number: int) -> None:
    admission = Admission(Arbiter(8), Metrics(), max_queue=1000, max_waiting_bytes=0)
    holder = await admission.acquire(Kind.LLM)
    image = asyncio.ensure_future(admission.acquire(Kind.IMAGE))
    await settle()
    chats = [asyncio.ensure_future(admission.acquire(Kind.LLM)) for _ in range(number)]
    await settle()
    assert admission.counts.waiting_llm == number

    for chat in chats:
        chat.cancel()

    assert admission.counts.waiting_llm == 0, "before their tasks have run again"
    image.cancel()
    assert not admission.counts.image_pending
    holder.release()
    assert admission.counts.state is State.IDLE
    await asyncio.gather(image, *chats, return_exceptions=True)


async def test_an_image_that_leaves_lets_chats_go_before_its_task_runs_again() -> None:
    admission = Admission(Arbiter(8), Metrics(), max_queue=1000, max_waiting_bytes=0)
    with await admission.acquire(Kind.LLM):
        image = asyncio.ensure_future(admission.acquire(Kind.IMAGE))
        await settle()
        chats = [asyncio.ensure_future(admission.acquire(Kind.LLM)) for _ in range(3)]
        await settle()
        assert admission.counts == (State.LLM, 1, True, 3, 1, False)

        image.cancel()

        assert admission.counts == (State.LLM, 4, False, 0, 0, False)
        for chat in chats:
            (await chat).release()


def test_chats_that_keep_coming_do_not_keep_an_image_waiting() -> None:
    async def play() -> None:
        admission = Admission(Arbiter(8), Metrics(), max_queue=1000, max_waiting_bytes=0)
        before = [await admission.acquire(Kind.LLM) for _ in range(3)]
        image = asyncio.ensure_future(admission.acquire(Kind.IMAGE))
        late: list[asyncio.Task[Grant]] = []
        for grant in before:
            assert not image.done()
            late.append(asyncio.ensure_future(admission.acquire(Kind.LLM)))
            await settle()
            grant.release()
        await settle()

        assert image.done()
        assert not any(chat.done() for chat in late)
        image.result().release()
        for chat in late:
            (await chat).release()

    run_instantly(play)


def test_the_owner_of_a_lock_that_was_reset_ends_without_losing_a_grant() -> None:
    async def play() -> None:
        admission = Admission(Arbiter(8), Metrics(), max_queue=10, max_waiting_bytes=0)
        old = await admission.acquire(Kind.IMAGE)
        admission.reset()
        chat = await admission.acquire(Kind.LLM)
        image = asyncio.ensure_future(admission.acquire(Kind.IMAGE))
        behind = asyncio.ensure_future(admission.acquire(Kind.LLM))
        await settle()

        image.cancel()
        assert not old.finish()
        old.release()
        await settle()

        assert behind.done()
        behind.result().release()
        chat.release()
        assert admission.counts.state is State.IDLE

    run_instantly(play)


def test_a_grant_in_the_moment_of_the_time_out_is_used() -> None:
    async def play() -> None:
        admission = Admission(Arbiter(8), Metrics(), max_queue=10, max_waiting_bytes=0)
        holder = await admission.acquire(Kind.IMAGE)
        asyncio.get_running_loop().call_later(1.0, holder.release)
        waiter = asyncio.ensure_future(admission.acquire(Kind.LLM, timeout=1.0))

        (await waiter).release()

    run_instantly(play)


async def test_the_time_out_counts_from_the_arrival() -> None:
    admission = Admission(Arbiter(8), Metrics(), max_queue=10, max_waiting_bytes=0)
    long_ago = asyncio.get_running_loop().time() - 100.0
    with await admission.acquire(Kind.LLM, timeout=60.0, arrived=long_ago):
        # What need not wait is not too late.
        image = asyncio.ensure_future(admission.acquire(Kind.IMAGE))
        await settle()

        with pytest.raises(RefusedError, match="within 60s"):
            await admission.acquire(Kind.LLM, timeout=60.0, arrived=long_ago)

    (await image).release()
