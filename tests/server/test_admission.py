"""Waiting for the lock: what a waiter that leaves, times out or is refused leaves behind."""

import asyncio
import logging

import pytest

from ocgpu.server.admission import Admission, Grant
from ocgpu.server.arbiter import Arbiter, Kind, State
from ocgpu.server.metrics import Metrics
from ocgpu.server.refusal import RefusedError
from tests.server.instant import settle


def make(*, batch: int = 8, queue: int = 16, memory: int = 1000) -> Admission:
    return Admission(Arbiter(batch), Metrics(), max_queue=queue, max_waiting_bytes=memory)


def start(admission: Admission, kind: Kind, timeout: float = 0.0) -> "asyncio.Task[Grant]":
    return asyncio.ensure_future(admission.acquire(kind, timeout=timeout))


async def test_the_lock_is_granted_and_given_back() -> None:
    admission = make()

    with await admission.acquire(Kind.LLM):
        assert admission.counts.state is State.LLM

    assert admission.counts.state is State.IDLE


async def test_an_image_waits_for_the_llm_requests_before_it() -> None:
    admission = make()
    chat = await admission.acquire(Kind.LLM)
    image = start(admission, Kind.IMAGE)
    late = start(admission, Kind.LLM)
    await settle()
    assert not image.done()
    assert not late.done()

    chat.release()
    with await image:
        await settle()
        assert not late.done()

    (await late).release()
    assert admission.counts == (State.IDLE, 0, False, 0, 0, False)


async def test_a_waiter_that_is_cancelled_is_removed() -> None:
    admission = make()
    chat = await admission.acquire(Kind.LLM)
    image = start(admission, Kind.IMAGE)
    late = start(admission, Kind.LLM)
    await settle()

    image.cancel()
    await settle()

    assert image.cancelled()
    assert late.done(), "the pending image no longer holds chats up"
    (await late).release()
    chat.release()
    assert admission.counts == (State.IDLE, 0, False, 0, 0, False)


@pytest.mark.parametrize("kind", list(Kind))
async def test_a_waiter_cancelled_in_the_moment_of_its_grant_gives_it_back(kind: Kind) -> None:
    admission = make()
    first = await admission.acquire(Kind.IMAGE)
    waiter = start(admission, kind)
    await settle()

    first.release()
    waiter.cancel()
    await settle()

    assert waiter.cancelled()
    assert admission.counts == (State.IDLE, 0, False, 0, 0, False)


async def test_a_grant_to_one_who_was_cancelled_just_before_goes_to_the_next() -> None:
    admission = make()
    first = await admission.acquire(Kind.IMAGE)
    left = start(admission, Kind.IMAGE)
    stays = start(admission, Kind.LLM)
    await settle()

    left.cancel()
    first.release()
    await settle()

    assert stays.done()
    (await stays).release()
    assert admission.counts == (State.IDLE, 0, False, 0, 0, False)


async def test_a_card_handed_over_to_one_who_left_is_given_to_whoever_frees_it() -> None:
    admission = make()
    abandoned: list[Grant] = []
    admission.on_abandoned = abandoned.append
    first = await admission.acquire(Kind.IMAGE)
    left = start(admission, Kind.IMAGE)
    await settle()

    assert first.finish()
    left.cancel()
    await settle()

    assert len(abandoned) == 1
    assert admission.counts.state is State.IMAGE
    abandoned[0].release()
    assert admission.counts.state is State.IDLE


async def test_a_card_is_not_handed_over_to_one_who_is_about_to_leave() -> None:
    admission = make()
    first = await admission.acquire(Kind.IMAGE)
    left = start(admission, Kind.IMAGE)
    await settle()

    left.cancel()

    assert not first.finish()
    first.release()
    await settle()
    assert admission.counts.state is State.IDLE


async def test_a_wait_ends_with_its_time_out() -> None:
    admission = make()
    image = await admission.acquire(Kind.IMAGE)

    with pytest.raises(RefusedError, match=r"the gpu was not free within 0\.01s") as refusal:
        await admission.acquire(Kind.LLM, timeout=0.01)

    assert refusal.value.reason == "timeout"
    assert admission.counts.waiting_llm == 0
    image.release()


async def test_a_full_queue_refuses_at_once() -> None:
    admission = make(queue=1)
    image = await admission.acquire(Kind.IMAGE)
    waiter = start(admission, Kind.LLM)
    await settle()

    with pytest.raises(RefusedError) as refusal:
        await admission.acquire(Kind.LLM)

    assert refusal.value.reason == "queue_full"
    image.release()
    (await waiter).release()


async def test_a_full_queue_does_not_refuse_what_need_not_wait() -> None:
    admission = make(queue=1)

    grants = [await admission.acquire(Kind.LLM) for _ in range(5)]

    assert admission.counts.llm_inflight == 5
    for grant in grants:
        grant.release()


async def test_close_refuses_all_that_wait_and_all_that_come() -> None:
    admission = make()
    image = await admission.acquire(Kind.IMAGE)
    waiters = [start(admission, Kind.LLM), start(admission, Kind.IMAGE)]
    await settle()

    admission.close()
    await settle()

    for waiter in waiters:
        assert isinstance(waiter.exception(), RefusedError)
    with pytest.raises(RefusedError) as refusal:
        await admission.acquire(Kind.LLM)
    assert refusal.value.reason == "shutdown"
    image.release()
    assert admission.counts.state is State.IDLE


async def test_reset_lets_waiters_go_and_an_old_release_is_nothing() -> None:
    admission = make()
    stuck = await admission.acquire(Kind.IMAGE)
    waiter = start(admission, Kind.LLM)
    await settle()

    assert admission.reset() == {"state": "image", "released": 1}

    grant = await waiter
    stuck.release()
    assert admission.counts.llm_inflight == 1
    grant.release()


async def test_waiting_bodies_are_bounded_together() -> None:
    admission = make(memory=100)
    one = admission.reserve(Kind.LLM)
    two = admission.reserve(Kind.LLM)
    one.grow(60)

    with pytest.raises(RefusedError) as refusal:
        two.grow(41)

    assert refusal.value.reason == "body_memory"
    two.grow(40)
    one.release()
    one.release()
    assert admission.waiting_bytes == 40
    two.release()
    assert admission.waiting_bytes == 0


async def test_every_change_of_state_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    admission = make()

    with caplog.at_level(logging.INFO, "ocgpu.server"):
        first = await admission.acquire(Kind.LLM)
        second = await admission.acquire(Kind.LLM)
        first.release()
        second.release()
        (await admission.acquire(Kind.IMAGE)).release()

    assert [record.getMessage() for record in caplog.records] == [
        "state: llm",
        "state: idle",
        "state: image",
        "state: idle",
    ]
    assert [step.after for step in admission.transitions] == ["llm", "idle", "image", "idle"]


async def test_a_listener_that_fails_costs_no_grant(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_state: State) -> None:
        raise OSError

    admission = Admission(Arbiter(8), Metrics(), max_queue=16, max_waiting_bytes=0, on_change=fail)

    with await admission.acquire(Kind.IMAGE):
        chat = start(admission, Kind.LLM)
        await settle()
    (await chat).release()

    assert admission.counts == (State.IDLE, 0, False, 0, 0, False)
    assert "a change of state was not taken note of" in caplog.text


async def test_waits_are_counted_by_kind() -> None:
    admission = make()
    metrics = Metrics()
    admission._metrics = metrics
    (await admission.acquire(Kind.LLM)).release()
    (await admission.acquire(Kind.LLM)).release()
    (await admission.acquire(Kind.IMAGE)).release()

    text = metrics.render(admission.counts)

    assert 'gpulock_lock_wait_seconds_count{kind="llm"} 2' in text
    assert 'gpulock_lock_wait_seconds_count{kind="image"} 1' in text
