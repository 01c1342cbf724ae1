"""Invariants of the parts that only compute: for all seeds, and for what atheris makes of them.

`FUZZ_SECONDS=600` gives each target so long; without it each gets a fixed number of fixed runs.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

SEEDS = Path(__file__).parent / "data" / "fuzz"
SECONDS = int(os.environ.get("FUZZ_SECONDS", "0"))
# About a second each.
RUNS = {
    "routes": 100_000,
    "commands": 20_000,
    "headers": 10_000,
    "documents": 1000,
    "settings": 2000,
}
KEPT = [(path.parent.name, path.name) for path in sorted(SEEDS.glob("*/*"))]


@pytest.mark.parametrize(("target", "seed"), KEPT)
def test_the_invariants_hold_for_every_seed(target: str, seed: str) -> None:
    TARGETS[target]((SEEDS / target / seed).read_bytes())


def test_every_target_has_seeds() -> None:
    assert {target for target, _ in KEPT} == set(TARGETS) == set(RUNS)


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="no atheris: Linux and Python below 3.14"
)
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("target", list(TARGETS))
def test_the_invariants_hold_for_what_a_fuzzer_finds(target: str, tmp_path: Path) -> None:
    bound = [f"-max_total_time={SECONDS}"] if SECONDS else ["-seed=1", f"-runs={RUNS[target]}"]
    found = tmp_path / "found"
    found.mkdir()

    run = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz", target),
            *(*bound, "-max_len=4096", f"-artifact_prefix={tmp_path}/", str(found)),
            str(SEEDS / target),
        ],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=SECONDS + 100,
        check=False,
    )

    assert run.returncode == 0, run.stderr[-4000:]
    assert "Done" in run.stderr
