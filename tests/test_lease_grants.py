"""Eight processes take the lease while some of them are killed and stopped at random."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from ocgpu import Lease, lease_status
from tests.grants import Grant, Taker, overlaps
from tests.waiting import wait_until

GRANTS = int(os.environ.get("OCGPU_TEST_GRANTS", "2000"))
"""How many grants to see; `.ci/run` asks for more."""


def test_the_oracle_sees_what_must_not_be() -> None:
    one, two = Grant(0, 10, "exclusive", 1), Grant(9, 12, "shared", 2)
    three = Grant(5, 6, "shared", 3)

    assert overlaps([one, two]) == [(one, two)]
    assert overlaps([two, three, Grant(10, 11, "shared", 4)]) == []
    assert overlaps([Grant(0, 10, "shared", 1), Grant(5, 6, "exclusive", 2)]) != []
    assert overlaps([one, Grant(10, 11, "exclusive", 2)]) == []


@pytest.mark.timeout(30 + GRANTS / 50)
@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_no_two_exclude_each_other_in_vain(tmp_path: Path) -> None:
    chance = random.Random(1)  # noqa: S311  # whom to kill, not a secret
    ended: list[Taker] = []
    takers = [Taker(tmp_path / f"log-{number}", number) for number in range(8)]
    kills = 0
    try:
        while sum(taker.count() for taker in (*ended, *takers)) < GRANTS:
            pause = time.monotonic() + chance.uniform(0.02, 0.08)
            wait_until(lambda pause=pause: time.monotonic() >= pause)
            index = chance.randrange(len(takers))
            if chance.random() < 0.3:
                takers[index].process.send_signal(signal.SIGSTOP)
                pause = time.monotonic() + 0.01
                wait_until(lambda pause=pause: time.monotonic() >= pause)
                takers[index].process.send_signal(signal.SIGCONT)
            takers[index].kill()
            kills += 1
            ended.append(takers[index])
            takers[index] = Taker(tmp_path / f"log-{8 + kills}", 8 + kills)
    finally:
        for taker in takers:
            taker.kill()
    grants = [grant for taker in (*ended, *takers) for grant in taker.grants()]

    assert len(grants) >= GRANTS * 0.9, f"{len(grants)} grants, {kills} kills"
    assert overlaps(grants) == []
    assert lease_status().waiters == []
    assert Lease().try_acquire()
