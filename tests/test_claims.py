"""No slot has two owners, whatever is done to them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ocgpu import Pacer
from tests.namespaces import in_namespaces
from tests.seed_peer import SeedPrograms
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("gpu_dir", "gpu_key")]


def run_harness(log: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.claims", "--log", log, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    # Enough happened for a fault to show.
    assert result["claims"] > 100
    assert result["slots"] == 16
    assert min(result["kills"], result["stops"]) > 5
    return result


@pytest.mark.parametrize("namespaces", [[], ["--namespaces"]], ids=["pids", "all_are_pid_1"])
def test_no_slot_has_two_owners_under_kills_and_stops(
    tmp_path: Path, namespaces: list[str]
) -> None:
    if namespaces:
        in_namespaces("--pid")

    result = run_harness(tmp_path / "log", "--seconds", "10", *namespaces)

    assert result["double_claims"] == 0, result
    # Nobody who died left a slot behind.
    with Pacer() as survivor:
        wait_until(lambda: survivor.snapshot().peers == [], 10)


def test_the_count_of_double_claims_finds_those_of_the_seeds_rule(
    tmp_path: Path, seed_programs: SeedPrograms
) -> None:
    seed = ("--seed", str(seed_programs.library), str(tmp_path / "segment"))

    result = run_harness(tmp_path / "log", "--seconds", "5", "--stop", "0.15", "0.4", *seed)

    assert result["double_claims"] > 0, result
