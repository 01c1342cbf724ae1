"""A whole day of one card: the proxy, its engines, and jobs of others under `ocgpu run`."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import ocgpu
from tests.fakes import Engines
from tests.processes import Processes
from tests.recordings import blur_workflow
from tests.server.client import background, call
from tests.server.jobs import chat, hold_an_image, open_chat, post_image
from tests.server.served import Served, start_serve
from tests.waiting import wait_until

# Writes when it has the card and when it has done with it, on the clock of the fakes' oracle.
JOB = """
import json, os, sys, time
def note(**what):
    with open(sys.argv[1], "a") as diary:
        diary.write(json.dumps({**what, "pid": os.getpid()}) + "\\n")
note(began=time.monotonic())
time.sleep(float(sys.argv[2]))
note(ended=time.monotonic())
"""


class Outsider:
    """A job of somebody else that takes the card by `ocgpu run`.

    Attributes:
        began: When it got the card; 0.0 before.
        ended: When it had done with it.
    """

    def __init__(self, processes: Processes, folder: Path, name: str, seconds: float) -> None:
        self._diary = folder / f"{name}.diary"
        command = [sys.executable, "-m", "ocgpu", "run", "--reason", "training", "--"]
        command += [sys.executable, "-c", JOB, str(self._diary), str(seconds)]
        self.process = processes.start(command, log=folder / f"{name}.log")
        self.began = self.ended = 0.0

    def wait_begun(self) -> None:
        self.began = wait_until(lambda: self._noted("began"), 20, "the job has the card")

    def wait_ended(self) -> None:
        assert self.process.wait(timeout=20) == 0
        self.ended = self._noted("ended")

    def kill(self) -> None:
        """Kill the program itself, as it computes."""
        pid = json.loads(self._diary.read_text().splitlines()[0])["pid"]
        os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=20)
        self.ended = self.began

    def _noted(self, what: str) -> float:
        if not self._diary.exists():
            return 0.0
        lines = [json.loads(line) for line in self._diary.read_text().splitlines()]
        return next((line[what] for line in lines if what in line), 0.0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_day_on_one_card(processes: Processes, engines: Engines, tmp_path: Path) -> None:
    served = start_serve(processes, engines, tmp_path / "serve.log")
    chats_together(served)
    assert lease_mode() == "shared"

    images_in_a_row(engines, served)

    outsiders = [a_job_while_chats_arrive(processes, served, tmp_path)]
    chats_together(served)
    outsiders.append(a_job_that_is_killed(processes, served, tmp_path))

    served = serve_is_killed_and_started_again(processes, engines, served, tmp_path)
    outsiders.append(a_job_between_two_requests(processes, tmp_path))
    assert chat(served).status == 200
    assert post_image(served).status == 200
    assert chat(served).status == 200

    served.wait_state("idle", llm_inflight=0)
    assert served.stop() == 0
    assert not ocgpu.lease_status().held
    engines.oracle.assert_exclusive()
    for job in outsiders:
        assert_alone(engines, job)


def chats_together(served: Served) -> None:
    answers = [background(lambda: chat(served)) for _ in range(3)]
    assert [answer.result().status for answer in answers] == [200, 200, 200]


def images_in_a_row(engines: Engines, served: Served) -> None:
    nodes = engines.comfy.hold_jobs()
    assert post_image(served, color=1).status == 200
    nodes.wait_reached()
    assert lease_mode() == "exclusive"
    second = background(lambda: post_image(served, color=2))
    served.wait_waiting("image", 1)
    waiting = background(lambda: chat(served))
    served.wait_waiting("llm", 1)

    nodes.open()

    assert (second.result().status, waiting.result().status) == (200, 200)
    assert lease_mode() == "shared"


def a_job_while_chats_arrive(processes: Processes, served: Served, folder: Path) -> Outsider:
    job = Outsider(processes, folder, "while", 3.0)
    job.wait_begun()
    waiting = [background(lambda: chat(served)) for _ in range(3)]
    served.wait_waiting("llm", 3)
    health = served.health()
    assert (health["state"], health["llm_inflight"]) == ("idle", 0)
    assert (health["lease"]["mode"], health["lease"]["waiting"]) == (None, True)

    job.wait_ended()

    assert [answer.result().status for answer in waiting] == [200, 200, 200]
    return job


def a_job_that_is_killed(processes: Processes, served: Served, folder: Path) -> Outsider:
    job = Outsider(processes, folder, "killed", 60.0)
    job.wait_begun()
    waiting = background(lambda: chat(served))
    image = background(lambda: post_image(served, color=3))
    served.wait_waiting("llm", 1)

    job.kill()

    assert (waiting.result().status, image.result().status) == (200, 200)
    return job


def serve_is_killed_and_started_again(
    processes: Processes, engines: Engines, served: Served, folder: Path
) -> Served:
    assert chat(served).status == 200
    token = engines.ollama.hold_token(1)
    with open_chat(served) as opened:
        opened.line()
        assert lease_mode() == "shared"
        assert ocgpu.lease_status().holders[0].pid == served.process.pid

        os.kill(served.process.pid, signal.SIGKILL)
        served.process.wait(timeout=10)

    wait_until(lambda: not psutil.pid_exists(served.process.pid))
    assert not ocgpu.lease_status().held
    token.open()
    again = start_serve(processes, engines, folder / "serve-again.log")
    # The model is still on the card, so the new one holds the lease without a request.
    wait_until(lambda: lease_mode() == "shared", what="the lease of a resident model")
    return again


def a_job_between_two_requests(processes: Processes, folder: Path) -> Outsider:
    job = Outsider(processes, folder, "between", 0.5)
    job.wait_begun()
    job.wait_ended()
    return job


def lease_mode() -> str | None:
    return ocgpu.lease_status().mode


def assert_alone(engines: Engines, job: Outsider) -> None:
    """Fail where an engine held memory at any moment that the job had the card."""
    resident = {"llm": 0, "image": 0}
    for moment in engines.oracle.moments:
        if moment.at > job.ended:
            break
        resident[moment.kind] = moment.resident_bytes
        inside = moment.at >= job.began
        assert not (inside and moment.resident_bytes), f"{moment} beside a job of others"
        before = dict(resident)
    assert not any(before.values()), f"{before} when a job of others ended"


def test_a_request_that_meets_a_stranger_is_told_who_it_is(
    processes: Processes, serve: Callable[..., Served], tmp_path: Path
) -> None:
    served = serve(LEASE_WAIT_TIMEOUT="300ms")
    job = Outsider(processes, tmp_path, "stranger", 60.0)
    job.wait_begun()

    for refused in (chat(served), post_image(served)):
        assert (refused.status, refused.header("Retry-After")) == (503, "30")
        document = refused.json()
        assert document["reason"] == "lease"
        assert ": training" in document["error"]

    job.kill()
    assert chat(served).status == 200
    served.wait_state("idle", llm_inflight=0, image_pending=False)
    assert served.metrics()['gpulock_refused_total{kind="llm",reason="lease"}'] == 1


def test_a_lease_switched_off_is_neither_taken_nor_waited_for(
    processes: Processes, serve: Callable[..., Served], tmp_path: Path
) -> None:
    served = serve(LEASE="off")
    job = Outsider(processes, tmp_path, "stranger", 60.0)
    job.wait_begun()

    assert chat(served).status == 200

    lease = served.health()["lease"]
    assert lease == {"enabled": False, "reason": "switched off by `LEASE`"}
    job.kill()


def test_the_lease_is_given_up_when_the_last_model_has_left_by_itself(
    engines: Engines, served: Served
) -> None:
    assert chat(served, keep_alive="1ms").status == 200
    wait_until(lambda: engines.ollama.usage.resident_bytes == 0, what="the model has left")

    wait_until(lambda: lease_mode() is None, 15, "the lease was given up")
    assert chat(served).status == 200
    assert lease_mode() == "shared"


def test_a_forced_release_gives_the_machine_s_lease_up_as_well(
    engines: Engines, served: Served
) -> None:

    nodes = hold_an_image(engines, served)
    waiting = background(lambda: chat(served))
    served.wait_waiting("llm", 1)

    assert call("POST", f"{served.admin}/gpulock/release").status == 200

    assert waiting.result().status == 200
    assert lease_mode() == "shared"
    nodes.open()
    wait_until(lambda: served.metrics()['gpulock_image_jobs_total{result="done"}'] == 1)
    assert chat(served).status == 200
    assert lease_mode() == "shared"
    # What the image left is freed all the same: chats have the card now.
    wait_until(lambda: engines.comfy.usage.resident_bytes == 0, what="ComfyUI's memory")


def test_an_image_job_past_the_proxy_is_reported_while_it_is_there(
    engines: Engines, served: Served
) -> None:
    nodes = engines.comfy.hold_jobs()
    assert call("POST", f"{engines.comfy.url}/prompt", blur_workflow()).status == 200
    nodes.wait_reached()

    wait_until(lambda: served.health()["outside"]["image_jobs"] == 1, 15, "it is seen")
    assert served.metrics()["gpulock_outside_image_jobs"] == 1
    assert any(line["message"] == "image jobs went in past the proxy" for line in served.lines())

    nodes.open()
    wait_until(lambda: served.health()["outside"]["image_jobs"] == 0, 15, "it is gone")


def test_an_image_of_before_a_restart_hands_no_card_of_a_stranger_over(
    processes: Processes, engines: Engines, served: Served, tmp_path: Path
) -> None:
    nodes = hold_an_image(engines, served)
    job = Outsider(processes, tmp_path, "stranger", 60.0)
    os.kill(served.process.pid, signal.SIGKILL)
    served.process.wait(timeout=10)
    job.wait_begun()
    again = start_serve(processes, engines, tmp_path / "serve-again.log")
    again.wait_state("image")
    waiting = background(lambda: post_image(again, color=9))
    again.wait_waiting("image", 1)

    nodes.open()
    again.wait_state("idle", image_pending=True)
    # That of before the restart alone.
    assert len(engines.record.calls("POST /prompt")) == 1
    job.kill()

    assert waiting.result().status == 200


def test_what_an_image_left_while_serve_was_away_is_freed_at_its_start(
    processes: Processes, engines: Engines, served: Served, tmp_path: Path
) -> None:
    nodes = hold_an_image(engines, served)
    os.kill(served.process.pid, signal.SIGKILL)
    served.process.wait(timeout=10)
    nodes.open()
    wait_until(lambda: not engines.comfy.jobs.remaining(), what="the job has ended")
    assert engines.comfy.usage.resident_bytes > 0

    again = start_serve(processes, engines, tmp_path / "serve-again.log")

    assert chat(again).status == 200
    engines.oracle.assert_exclusive()


def test_a_model_loaded_past_the_proxy_is_held_for(engines: Engines, served: Served) -> None:
    body = {"model": "llama3.2", "prompt": "", "keep_alive": -1}
    assert call("POST", f"{engines.ollama.url}/api/generate", body).status == 200
    assert served.health()["lease"]["enabled"]

    wait_until(lambda: lease_mode() == "shared", 15, "the lease of a resident model")
