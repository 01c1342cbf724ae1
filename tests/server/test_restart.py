"""A serve that is killed while an image renders, and the one that is started after it."""

from collections.abc import Callable
from pathlib import Path

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


def test_no_request_is_served_before_the_look_for_old_images(
    engines: Engines, processes: Processes, served: Served, tmp_path: Path
) -> None:
    nodes = hold_an_image(engines, served)
    served.process.kill()
    served.process.wait(timeout=10)
    look = Gate()
    engines.comfy.fail("GET /api/jobs", stall(look))
    environ = serve_environ(engines)

    process = processes.start(COMMAND, log=tmp_path / "after.log", environ=environ)
    look.wait_reached()
    assert "listening" not in (tmp_path / "after.log").read_text()
    engines.comfy.heal()
    look.open()

    after = Served(process, tmp_path / "after.log")
    assert after.health()["state"] == "image"
    nodes.open()
    after.wait_state("idle")


def test_a_comfyui_that_hangs_delays_a_start_by_seconds_only(
    engines: Engines, processes: Processes, tmp_path: Path
) -> None:
    engines.comfy.fail("*", stall(Gate()))

    after = restarted(processes, engines, tmp_path / "after.log")

    assert chat(after).status == 200
    wait_until(lambda: after.health()["upstreams"]["comfyui"]["reachable"] is False, what="probe")
