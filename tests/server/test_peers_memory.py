"""What `ocgpu peers` shows of memory, through the real nvidia-ml-py and a stub of the driver."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.nvml_stub import ERRORS, GIB, Driver
from tests.processes import Processes
from tests.server.occupants import Occupants

MIB = 1 << 20
LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")


@pytest.fixture
def occupants(processes: Processes, driver: Driver, tmp_path: Path) -> Occupants:
    return Occupants(processes, driver, tmp_path)


def peers_command(driver: Driver, *arguments: str, **environ: str) -> str:
    command = (sys.executable, "-m", "ocgpu", "peers", *arguments)
    full = {**os.environ, **driver.environ, **environ}
    done = subprocess.run(command, env=full, capture_output=True, text=True, timeout=20, check=True)
    assert done.stderr == ""
    return done.stdout


def test_the_command_shows_the_memory_of_each_peer(occupants: Occupants, driver: Driver) -> None:
    chat, child = occupants.peer("chat")
    secret, _ = occupants.peer("secret")
    driver.holds((chat, 512 * MIB), (child, 2 * GIB), (secret, None))

    peers = json.loads(peers_command(driver, "--json"))["peers"]
    rows = [line.split() for line in peers_command(driver).splitlines()[1:]]

    assert {one["pid"]: one["memory_bytes"] for one in peers} == {chat: 2560 * MIB, secret: None}
    assert [row[-2:] for row in rows] == [
        ["MEMORY", "NAME"],
        ["2560MiB", "chat"],
        ["?", "secret"],
    ]


@pytest.mark.parametrize("cause", ["no library", *ERRORS])
def test_the_command_says_nothing_of_memory_that_it_cannot_know(
    occupants: Occupants, driver: Driver, cause: str
) -> None:
    chat, _ = occupants.peer("chat")
    driver.holds((chat, GIB))
    environ = {}
    if cause == "no library":
        environ["LD_LIBRARY_PATH"] = ""
    for function in LISTS:
        driver.fail(function, ERRORS.get(cause, 0))

    peers = json.loads(peers_command(driver, "--json", **environ))["peers"]

    assert [one["memory_bytes"] for one in peers] == [None]
    assert "MEMORY" not in peers_command(driver, **environ)
