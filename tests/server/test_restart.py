"""A serve that is killed while an image renders, and the one that is started after it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes import Engines, Gate
from tests.fakes.faults import stall
from tests.processes import Processes
from tests.server.client import background
from tests.server.jobs import assert_in_order, chat, hold_an_image
from tests.server.served import COMMAND, Served, serve_environ
from tests.waiting import wait_until

Serve = Callable[..., Served]


def restarted(processes: Processes, engines: Engines, log: Path) -> Served:
    environ = serve_environ(engines)
    return Served(processes.start(COMMAND, log=log, environ=environ), log)


def test_an_image_from_before_a_kill_is_waited_for_by_the_first_chat(
    engines: Engines, processes: Processes, served: Served, tmp_path: Path
) -> None:
    nodes = hold_an_image(engines, served)
    served.process.kill()
    served.process.wait(timeout=10)

    after = restarted(processes, engines, tmp_path / "after.log")
    first = background(lambda: chat(after))

    after.wait_state("image")
    after.wait_waiting("llm", 1)
    assert engines.record.calls("POST /api/chat") == []
    nodes.open()
    assert first.result().status == 200
    assert_in_order(engines, "POST /prompt", "POST /free", "POST /api/chat")
    engines.oracle.assert_exclusive()
    assert after.metrics()['gpulock_image_jobs_total{result="done"}'] == 1


@pytest.mark.parametrize("job", [True, False])
def test_no_chat_is_served_before_the_look_for_old_images(
    engines: Engines, processes: Processes, served: Served, tmp_path: Path, job: bool
) -> None:
    nodes = hold_an_image(engines, served) if job else Gate()
    served.process.kill()
    served.process.wait(timeout=10)
    look = Gate()
    engines.comfy.fail("GET /api/jobs", stall(look), times=1)

    after = restarted(processes, engines, tmp_path / "after.log")
    first = background(lambda: chat(after))
    after.wait_waiting("llm", 1)
    assert after.health()["state"] == "image"
    look.open()

    if job:
        wait_until(lambda: len(engines.record.calls("GET /api/jobs")) > 3, what="looks")
        assert engines.record.calls("POST /api/chat") == []
        nodes.open()
    assert first.result().status == 200
    engines.oracle.assert_exclusive()


def test_a_comfyui_that_hangs_delays_the_first_chat_by_seconds_only(
    engines: Engines, processes: Processes, tmp_path: Path
) -> None:
    engines.comfy.fail("*", stall(Gate()))

    after = restarted(processes, engines, tmp_path / "after.log")

    assert chat(after).status == 200
    wait_until(lambda: after.health()["upstreams"]["comfyui"]["reachable"] is False, what="probe")


@pytest.mark.parametrize("down", [True, False])
def test_a_start_before_no_old_image_takes_no_lock(
    engines: Engines, processes: Processes, tmp_path: Path, down: bool
) -> None:
    if down:
        engines.kill(engines.comfy)

    after = restarted(processes, engines, tmp_path / "after.log")

    assert chat(after).status == 200
    states = [line["message"] for line in after.lines() if line["message"].startswith("state:")]
    assert states[:1] == ["state: llm"]
