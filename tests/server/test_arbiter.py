"""The grant rule, event by event."""

import pytest

from ocgpu.server.arbiter import Arbiter, Kind, State

LLM = Kind.LLM
IMAGE = Kind.IMAGE
EVICTION = Kind.EVICTION


def ids(grants: list) -> list[int]:
    return [grant.id for grant in grants]


def test_llm_requests_run_together() -> None:
    arbiter = Arbiter(8)

    assert ids(arbiter.request(1, LLM)) == [1]
    assert ids(arbiter.request(2, LLM)) == [2]

    assert arbiter.counts == (State.LLM, 2, False, 0, 0, False)


def test_image_waits_for_llm_requests_to_drain() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, LLM)
    arbiter.request(2, LLM)

    assert arbiter.request(3, IMAGE) == []
    assert arbiter.release(1) == []
    assert ids(arbiter.release(2)) == [3]

    assert arbiter.state is State.IMAGE


def test_new_llm_requests_wait_while_an_image_is_pending() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, LLM)
    arbiter.request(2, IMAGE)

    assert arbiter.request(3, LLM) == []

    assert arbiter.counts == (State.LLM, 1, True, 1, 1, False)


def test_llm_requests_that_waited_go_together_after_the_image() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, IMAGE)
    arbiter.request(2, LLM)
    arbiter.request(3, LLM)

    assert ids(arbiter.release(1)) == [2, 3]


def test_images_run_one_by_one_in_the_order_they_came() -> None:
    arbiter = Arbiter(0)
    arbiter.request(1, IMAGE)
    for number in (2, 3, 4):
        assert arbiter.request(number, IMAGE) == []

    order = [arbiter.release(number)[0].id for number in (1, 2, 3)]

    assert order == [2, 3, 4]
    assert arbiter.release(4) == []
    assert arbiter.state is State.IDLE


def test_a_pending_image_that_leaves_lets_waiting_llm_requests_go() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, LLM)
    arbiter.request(2, IMAGE)
    arbiter.request(3, LLM)

    assert ids(arbiter.cancel(2)) == [3]


def test_a_waiter_that_left_is_never_granted() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, IMAGE)
    arbiter.request(2, IMAGE)
    arbiter.request(3, LLM)
    arbiter.cancel(2)
    arbiter.cancel(3)

    assert arbiter.release(1) == []
    assert arbiter.state is State.IDLE


def test_release_twice_frees_once() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, LLM)
    arbiter.request(2, LLM)

    arbiter.release(1)
    arbiter.release(1)

    assert arbiter.counts.llm_inflight == 1


def test_reset_lets_waiters_go_and_makes_later_releases_nothing() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, IMAGE)
    arbiter.request(2, LLM)

    dropped, grants = arbiter.reset()

    assert dropped == [1]
    assert ids(grants) == [2]
    assert arbiter.release(1) == []
    assert not arbiter.finish(1).handed_over
    assert arbiter.state is State.LLM


def test_after_close_nothing_is_granted_and_what_runs_may_end() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, LLM)
    arbiter.request(2, IMAGE)
    arbiter.request(3, LLM)

    assert arbiter.close() == [(2, IMAGE), (3, LLM)]

    assert arbiter.release(1) == []
    assert arbiter.state is State.IDLE


def test_a_number_in_use_is_refused() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, LLM)

    with pytest.raises(ValueError, match="request number in use: 1"):
        arbiter.request(1, IMAGE)


def test_an_image_hands_over_to_the_next_without_freeing() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, IMAGE)
    arbiter.request(2, IMAGE)
    arbiter.request(3, LLM)

    finish = arbiter.finish(1)

    assert finish.handed_over
    assert finish.grants == [(2, IMAGE, True)]
    assert arbiter.release(1) == []
    assert arbiter.state is State.IMAGE


def test_the_last_image_frees() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, IMAGE)
    arbiter.request(2, LLM)

    assert not arbiter.finish(1).handed_over
    assert arbiter.state is State.IMAGE
    assert ids(arbiter.release(1)) == [2]


def test_after_a_batch_all_waiting_llm_requests_go_before_the_next_image() -> None:
    arbiter = Arbiter(2)
    for number in (1, 2, 3):
        arbiter.request(number, IMAGE)
    arbiter.request(10, LLM)
    arbiter.request(11, LLM)

    assert arbiter.finish(1).handed_over
    assert not arbiter.finish(2).handed_over
    assert ids(arbiter.release(2)) == [10, 11]
    assert arbiter.request(12, LLM) == []
    assert arbiter.release(10) == []
    assert arbiter.release(11) == [(3, IMAGE, False)]


def test_a_batch_has_no_end_while_no_llm_request_waits() -> None:
    arbiter = Arbiter(2)
    for number in range(1, 6):
        arbiter.request(number, IMAGE)

    assert all(arbiter.finish(number).handed_over for number in range(1, 5))


def test_batch_counts_images_that_freed_in_between() -> None:
    arbiter = Arbiter(2)
    arbiter.request(1, IMAGE)
    arbiter.request(10, LLM)
    assert not arbiter.finish(1).handed_over
    arbiter.request(2, IMAGE)
    assert ids(arbiter.release(1)) == [2]
    arbiter.request(3, IMAGE)

    assert not arbiter.finish(2).handed_over
    assert ids(arbiter.release(2)) == [10]


def test_batch_of_0_frees_after_every_job_and_keeps_image_priority_absolute() -> None:
    arbiter = Arbiter(0)
    for number in range(1, 20):
        arbiter.request(number, IMAGE)
    arbiter.request(99, LLM)

    for number in range(1, 19):
        assert not arbiter.finish(number).handed_over
        assert ids(arbiter.release(number)) == [number + 1]


def test_an_eviction_goes_ahead_of_images_and_chats_that_wait() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, IMAGE)
    arbiter.request(2, IMAGE)
    arbiter.request(3, LLM)
    assert arbiter.request(4, EVICTION) == []

    # The batch ends with the job that runs: its owner frees the card.
    assert not arbiter.finish(1).handed_over
    assert [grant.id for grant in arbiter.release(1)] == [4]
    assert (arbiter.state, arbiter.counts.evicting) == (State.IDLE, True)
    assert [grant.id for grant in arbiter.release(4)] == [2]


def test_chats_that_come_wait_for_an_eviction_and_it_for_those_that_run() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, LLM)
    assert arbiter.request(2, EVICTION) == []
    assert arbiter.request(3, LLM) == []

    assert [grant.id for grant in arbiter.release(1)] == [2]
    assert [grant.id for grant in arbiter.release(2)] == [3]


def test_an_eviction_that_is_cancelled_holds_nobody_up() -> None:
    arbiter = Arbiter(8)
    arbiter.request(1, LLM)
    arbiter.request(2, EVICTION)
    arbiter.request(3, LLM)

    assert [grant.id for grant in arbiter.cancel(2)] == [3]
