"""Whose memory is whose, from what the driver lists and who descends from whom."""

import os
import subprocess
import sys

import psutil
import pytest

from ocgpu.lineage import inner_pids, is_descendant, lineage
from ocgpu.occupancy import Occupancy, Occupant
from tests.namespaces import in_namespaces


def occupancy(*occupants: Occupant, whole: bool = True) -> Occupancy:
    return Occupancy(occupants, 100, whole)


def holding(pid: int, size: int | None, *line: int) -> Occupant:
    return Occupant(pid, size, computes=True, lineage=line)


def test_children_count_for_the_nearest_alone() -> None:
    seen = occupancy(
        holding(30, 1, 30, 20, 10, 1),
        holding(20, 2, 20, 10, 1),
        holding(10, 4, 10, 1),
        holding(99, 8, 99, 1),
    )

    assert seen.by_root((10, 20)) == {10: 4, 20: 3}
    assert seen.by_root((10,)) == {10: 7}
    assert seen.by_root((30, 5)) == {30: 1, 5: 0}


def test_one_untold_size_makes_the_sum_unknown() -> None:
    seen = occupancy(holding(20, None, 20, 10), holding(21, 2, 21, 10))

    assert seen.by_root((10, 11)) == {10: None, 11: 0}


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_is_said_to_hold_nothing_while_somebody_is_hidden(whole: bool) -> None:
    hidden = holding(50, 5)
    seen = occupancy(holding(20, 2, 20, 10), *([hidden] if whole else []), whole=whole)

    assert seen.by_root((10, 11)) == {10: 2, 11: None}
    # A pid is enough to be known by.
    assert seen.by_root((50,)) == {50: 5 if whole else None}


def test_a_process_descends_from_those_who_started_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = lineage(child.pid)

        assert found[:2] == (child.pid, os.getpid())
        assert is_descendant(child.pid, (os.getpid(),)) is True
        assert is_descendant(child.pid, (2**22 + 5,)) is False
        assert is_descendant(2**22 + 5, (os.getpid(),)) is None
        assert is_descendant(2**22 + 5, (2**22 + 5,)) is True
    finally:
        child.communicate(b"\n", timeout=10)


def test_nobody_counts_for_init() -> None:
    seen = occupancy(holding(20, 2, 20, 10, 1))

    assert seen.by_root((1,)) == {1: 0}


def test_a_process_in_a_container_may_be_a_peer_that_is_called_otherwise_in_there() -> None:
    contained = Occupant(20, 2, computes=True, lineage=(20, 10, 1), inner=frozenset((1,)))

    assert occupancy(contained).by_root((1, 5)) == {1: None, 5: None}
    assert occupancy(contained).by_root((20, 5)) == {20: 2, 5: 0}


def test_a_process_in_a_pid_namespace_has_a_pid_in_there() -> None:
    with subprocess.Popen(
        [*in_namespaces("--pid"), "sh", "-c", "echo $$; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as outer:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "1\n"
        (inner,) = psutil.Process(outer.pid).children()

        assert inner_pids(lineage(inner.pid)) == {1}
        assert inner_pids(lineage(os.getpid())) == frozenset()
        outer.communicate("\n", timeout=10)
