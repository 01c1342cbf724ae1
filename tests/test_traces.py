"""What a worker's trace says, on traces made by hand."""

import math

import pytest

from tests.traces import (
    Step,
    Trace,
    hand_overs,
    percentile,
    recovery,
    releases,
    stalls,
    waiting,
    work,
)


def trace(*steps: tuple[float, float, float, int], idles: tuple[float, ...] = ()) -> Trace:
    return Trace([Step(*step) for step in steps], list(idles))


def test_work_counts_the_part_of_a_step_that_lies_in_the_span() -> None:
    one = trace((0.0, 0.0, 1.0, 100), (1.0, 2.0, 4.0, 100), (4.0, 4.0, 5.0, 100))

    assert work(one, 0.5, 3.0) == pytest.approx(50 + 50)
    assert work(one, 0.0, 5.0) == pytest.approx(300)
    assert work(one, 1.0, 2.0) == 0.0


def test_waiting_is_the_part_of_a_span_between_asking_and_beginning() -> None:
    one = trace((0.0, 0.0, 1.0, 1), (1.0, 3.0, 4.0, 1), (4.0, 6.0, 7.0, 1))

    assert waiting(one, 0.0, 4.0) == pytest.approx(0.5)
    assert waiting(one, 2.0, 4.0) == pytest.approx(0.5)
    assert waiting(one, 6.0, 7.0) == 0.0


def test_a_stall_reaches_from_one_end_of_a_step_to_the_next() -> None:
    one = trace((0.0, 0.0, 1.0, 1), (1.0, 3.0, 4.0, 1), (4.0, 4.0, 4.5, 1), (4.5, 8.0, 9.0, 1))

    assert stalls(one, 0.5, 4.2) == pytest.approx([1.0, 3.0, 0.5])
    assert stalls(one, 4.6, 5.0) == pytest.approx([4.5]), "one under way counts"


def test_silence_between_requests_is_no_stall() -> None:
    one = trace((0.0, 0.0, 1.0, 1), (9.0, 9.5, 10.0, 1), idles=(1.0,))

    assert stalls(one, 0.0, 20.0) == pytest.approx([1.0, 1.0])


def test_a_hand_over_is_from_the_end_of_one_to_the_begin_of_another_that_waited() -> None:
    giver = trace((0.0, 0.0, 1.0, 1), (1.0, 1.0, 2.0, 1), (2.0, 5.0, 6.0, 1))
    taker = trace((0.5, 2.25, 4.0, 1), (4.0, 4.0, 4.5, 1), (4.5, 7.0, 8.0, 1))

    assert sorted(hand_overs([giver, taker], 0.0, 10.0)) == pytest.approx([0.25, 0.5])


def test_one_that_overlaps_the_other_was_handed_nothing() -> None:
    giver = trace((0.0, 0.0, 1.0, 1), (1.0, 1.0, 2.0, 1), (2.0, 5.0, 6.0, 1))
    taker = trace((0.5, 1.5, 2.5, 1), (2.5, 9.0, 9.5, 1))

    assert hand_overs([giver, taker], 0.0, 6.0) == pytest.approx([2.5])


def test_a_release_is_from_the_end_of_a_request_to_the_begin_of_who_waited() -> None:
    leaving = trace(idles=(1.0, 5.0))
    staying = trace((0.5, 1.125, 2.0, 1), (4.0, 4.0, 6.0, 1))

    assert releases(leaving, staying) == pytest.approx([0.125])


def test_recovery_is_when_a_whole_window_has_the_solo_rate() -> None:
    shared = [(i * 0.02, i * 0.02 + 0.01, i * 0.02 + 0.02, 10) for i in range(50)]
    alone = [(1.05 + i * 0.01, 1.05 + i * 0.01, 1.06 + i * 0.01, 10) for i in range(50)]

    back = recovery(trace(*shared, *alone), 1.0, 1000.0, window=0.1, part=0.95)

    assert back == pytest.approx(0.145, abs=0.01)


def test_who_never_recovers_says_so() -> None:
    shared = [(i * 0.02, i * 0.02 + 0.01, i * 0.02 + 0.02, 10) for i in range(100)]

    assert recovery(trace(*shared), 1.0, 1000.0, window=0.1, part=0.95) == math.inf


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([3.0, 1.0, 2.0], percent) for percent in (0, 50, 99)] == [1.0, 2.0, 3.0]
    assert math.isnan(percentile([], 50))
