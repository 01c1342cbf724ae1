"""An image after a chat, with a driver that tells, is late, or refuses to tell what is held.

A real serve, the real nvidia-ml-py, a stub of the driver; the memory is that of Ollama's child.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import Engines
from tests.fakes.nvml_stub import ERRORS, GIB, Driver
from tests.processes import Processes
from tests.server.client import background
from tests.server.jobs import chat, post_image
from tests.server.occupants import EngineProcesses
from tests.server.served import COMMAND, Served, serve_environ
from tests.waiting import wait_until

LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")
MEMORY = "nvmlDeviceGetMemoryInfo"
COUNT = "nvmlDeviceGetCount_v2"
KEPT = 100 << 20

Serve = Callable[..., Served]


@pytest.fixture
def around(processes: Processes, tmp_path: Path) -> EngineProcesses:
    return EngineProcesses(processes, tmp_path)


@pytest.fixture
def serve(
    engines: Engines,
    around: EngineProcesses,
    driver: Driver,
    processes: Processes,
    tmp_path: Path,
) -> Serve:
    """A serve before that Ollama, which has answered a chat, and a ComfyUI that is recorded."""

    def start(**settings: str) -> Served:
        environ = {**serve_environ(engines), **driver.environ, **settings}
        environ["OLLAMA_URL"] = around.ollama_url
        log = tmp_path / "serve.log"
        served = Served(processes.start(COMMAND, log=log, environ=environ), log)
        assert chat(served).status == 200
        return served

    return start


def warnings(served: Served) -> list[dict[str, Any]]:
    return [line for line in served.lines() if line["level"] == "warning"]


def settling(driver: Driver) -> None:
    """Wait until the driver was asked again and again, as only a wait for memory does."""
    before = driver.calls(COUNT)
    wait_until(lambda: driver.calls(COUNT) > before + 8, what="looks at the memory")


def test_an_image_goes_out_only_when_the_memory_of_the_runner_is_back(
    engines: Engines, around: EngineProcesses, driver: Driver, serve: Serve
) -> None:
    driver.holds((around.runner, 6 * GIB))
    driver.holds((1, 7 * GIB), how="graphics")
    driver.holds((around.runner, 6 * GIB), card=1)
    served = serve(SETTLE_TIMEOUT="25s")

    image = background(lambda: post_image(served))
    settling(driver)
    assert engines.record.calls("POST /prompt") == []
    driver.holds((around.runner, KEPT))
    settling(driver)
    assert engines.record.calls("POST /prompt") == []
    driver.holds(card=1)

    assert image.result().status == 200
    settled = next(line for line in served.lines() if line["message"] == "memory settled")
    assert (settled["engine"], settled["of"]) == ("ollama", "processes")
    assert (settled["before_mib"], settled["after_mib"]) == (12288, 100)
    assert warnings(served) == []


def test_memory_of_the_runner_that_stays_holds_up_an_image_for_the_time_out_only(
    engines: Engines, around: EngineProcesses, driver: Driver, serve: Serve
) -> None:
    driver.holds((around.runner, 6 * GIB))
    served = serve(SETTLE_TIMEOUT="400ms")

    assert post_image(served).status == 200

    stayed = [line for line in warnings(served) if line["engine"] == "ollama"]
    assert [line["message"] for line in stayed] == ["memory was not freed, going on"] * len(stayed)
    assert stayed[0]["seconds"] >= 0.4
    assert engines.record.calls("POST /prompt")


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("functions", [LISTS, (*LISTS, MEMORY), (COUNT,)])
def test_a_driver_that_refuses_to_tell_holds_up_nothing_and_is_warned_of_once(
    around: EngineProcesses,
    driver: Driver,
    serve: Serve,
    functions: tuple[str, ...],
    error: str,
) -> None:
    driver.holds((around.runner, 6 * GIB))
    for function in functions:
        driver.fail(function, ERRORS[error])
    served = serve(SETTLE_TIMEOUT="60s")

    for _ in range(2):
        assert post_image(served).status == 200
        served.wait_state("idle")

    said = [line for line in warnings(served) if line["engine"] == "ollama"]
    assert len(said) == 1
    assert said[0]["message"].startswith("memory is not told ")


def test_memory_that_is_not_available_by_process_is_looked_for_on_the_card(
    engines: Engines, around: EngineProcesses, driver: Driver, serve: Serve
) -> None:
    driver.holds((around.runner, None))
    driver.set(used_0=6 * GIB)
    served = serve(SETTLE_TIMEOUT="25s")

    image = background(lambda: post_image(served))
    settling(driver)
    assert engines.record.calls("POST /prompt") == []
    driver.set(used_0=0)

    assert image.result().status == 200
    served.wait_state("idle")
    said = [line["message"] for line in warnings(served) if line["engine"] == "ollama"]
    assert said == [
        "memory is not told by process, watching the whole card: "
        "the driver does not tell what a process holds"
    ]


@pytest.mark.parametrize("error", ERRORS)
def test_a_driver_that_is_lost_in_the_middle_ends_the_wait(
    engines: Engines, around: EngineProcesses, driver: Driver, serve: Serve, error: str
) -> None:
    driver.holds((around.runner, 6 * GIB))
    served = serve(SETTLE_TIMEOUT="25s")

    image = background(lambda: post_image(served))
    settling(driver)
    assert engines.record.calls("POST /prompt") == []
    for function in (*LISTS, MEMORY):
        driver.fail(function, ERRORS[error])

    assert image.result(10).status == 200
    said = [line["message"] for line in warnings(served) if line["engine"] == "ollama"]
    assert len(said) == 1
    assert said[0].startswith("memory is not told at all, going on: ")
