"""Many clients at once, bounds, and the operator's hand, with real processes and sockets."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes import Engines
from tests.processes import Processes
from tests.recordings import blur_workflow
from tests.server.client import OpenCall, background, call
from tests.server.jobs import assert_in_order, chat, hold_an_image, open_chat, post_image
from tests.server.served import Served, start_serve
from tests.waiting import wait_until

Serve = Callable[..., Served]


def one_of_the_crowd(served: Served, number: int) -> int:
    """Chat, post an image, or leave before the answer; the status, 0 for one who left."""
    choice = random.Random(number)  # noqa: S311 - the same crowd in every run
    if number % 5 == 0:
        return post_image(served, color=number).status
    if number % 5 == 1:
        with open_chat(served) as opened:
            for _ in range(choice.randrange(3)):
                opened.line()
        return 0
    if number % 5 == 2:
        with OpenCall("POST", f"{served.comfy}/prompt", blur_workflow(color=1000 + number)):
            pass
        return 0
    return chat(served, stream=choice.random() < 0.5).status


def test_a_crowd_never_meets_on_the_card_and_leaves_nothing_behind(
    engines: Engines, served: Served
) -> None:
    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(lambda number: one_of_the_crowd(served, number), range(60)))

    assert set(statuses) == {0, 200}
    served.wait_state("idle", llm_inflight=0, image_pending=False)
    served.wait_waiting("llm", 0)
    served.wait_waiting("image", 0)
    engines.oracle.assert_exclusive()
    assert engines.oracle.uses("llm") >= 24
    assert engines.oracle.uses("image") >= 12 * 5
    assert call("GET", f"{engines.comfy.url}/prompt").json()["exec_info"]["queue_remaining"] == 0


def test_more_waiters_than_the_queue_takes_are_refused(engines: Engines, serve: Serve) -> None:
    served = serve(MAX_QUEUE="1")
    nodes = hold_an_image(engines, served)
    first = background(lambda: chat(served))
    served.wait_waiting("llm", 1)

    refused = chat(served)

    assert (refused.status, refused.header("Retry-After") is not None) == (503, True)
    nodes.open()
    assert first.result().status == 200


def test_more_waiting_bytes_than_allowed_are_refused(engines: Engines, serve: Serve) -> None:
    served = serve(MAX_WAITING_BYTES="5000")
    nodes = hold_an_image(engines, served)
    first = background(lambda: chat(served, options={"stop": "x" * 3000}))
    served.wait_waiting("llm", 1)

    refused = chat(served, options={"stop": "x" * 3000})

    assert refused.status == 503
    nodes.open()
    assert first.result().status == 200
    assert chat(served, options={"stop": "x" * 3000}).status == 200


def test_an_image_that_waits_too_long_is_refused_where_that_is_asked(
    engines: Engines, serve: Serve
) -> None:
    served = serve(IMAGE_WAIT_TIMEOUT="200ms")
    token = engines.ollama.hold_token(1)
    with open_chat(served) as opened:
        opened.line()

        assert post_image(served).status == 503

        token.open()
        assert opened.answer().status == 200
    assert engines.record.calls("POST /prompt") == []
    served.wait_state("idle", image_pending=False)


def test_a_job_from_before_the_start_is_waited_for(
    processes: Processes, engines: Engines, tmp_path: Path
) -> None:
    nodes = engines.comfy.hold_jobs()
    call("POST", f"{engines.comfy.url}/prompt", blur_workflow())
    nodes.wait_reached()

    served = start_serve(processes, engines, tmp_path / "serve.log")
    served.wait_state("image")
    waiting = background(lambda: chat(served))
    served.wait_waiting("llm", 1)
    nodes.open()

    assert waiting.result().status == 200
    assert_in_order(engines, "POST /prompt", "POST /free", "POST /api/chat")
    engines.oracle.assert_exclusive()


def test_the_operator_can_force_the_lock_open(engines: Engines, served: Served) -> None:
    nodes = hold_an_image(engines, served)
    waiting = background(lambda: chat(served))
    served.wait_waiting("llm", 1)

    answer = call("POST", f"{served.admin}/gpulock/release")

    assert answer.status == 200
    assert waiting.result().status == 200
    nodes.open()
    wait_until(lambda: served.metrics()['gpulock_image_jobs_total{result="done"}'] == 1)
    served.wait_state("idle", llm_inflight=0)
    assert chat(served).status == 200


def test_the_operator_can_evict_everything(engines: Engines, served: Served) -> None:
    assert chat(served).status == 200
    assert engines.ollama.usage.resident_bytes > 0

    answer = call("POST", f"{served.admin}/gpulock/unload")

    assert answer.status == 200
    wait_until(lambda: engines.ollama.usage.resident_bytes == 0, what="eviction")
    assert len(engines.record.calls("POST /free")) == 1


@pytest.mark.parametrize("path", ["/gpulock/release", "/gpulock/unload"])
def test_the_operator_s_routes_are_on_no_other_listener(
    engines: Engines, served: Served, path: str
) -> None:
    for listener in (served.ollama, served.comfy):
        assert call("POST", listener + path).status in {404, 405}
    assert len(engines.record.calls(f"POST {path}")) == 2
