"""What may go wrong around the lock, with real processes and sockets: nobody is left waiting."""

from collections.abc import Callable

import pytest

from tests.fakes import Engines, Gate
from tests.fakes.faults import old_embeddings
from tests.recordings import blur_workflow
from tests.server.client import OpenCall, background, call
from tests.server.jobs import assert_in_order, chat, hold_an_image, open_chat, post_image
from tests.server.served import Served
from tests.waiting import wait_until

Serve = Callable[..., Served]


def test_a_client_that_leaves_while_it_waits_is_never_sent_on(
    engines: Engines, served: Served
) -> None:
    nodes = hold_an_image(engines, served)

    with open_chat(served):
        served.wait_waiting("llm", 1)
    served.wait_waiting("llm", 0)
    nodes.open()

    served.wait_state("idle", llm_inflight=0)
    assert engines.record.calls("POST /api/chat") == []


def test_an_image_client_that_leaves_while_it_waits_is_never_sent_on(
    engines: Engines, served: Served
) -> None:
    token = engines.ollama.hold_token(1)
    with open_chat(served) as running:
        running.line()
        with OpenCall("POST", f"{served.comfy}/prompt", blur_workflow()):
            served.wait_state("llm", image_pending=True)
        served.wait_state("llm", image_pending=False)
        token.open()
        assert running.answer().status == 200

    served.wait_state("idle", llm_inflight=0)
    assert engines.record.calls("POST /prompt") == []


def test_an_image_client_that_leaves_during_the_unload_is_never_sent_on(
    engines: Engines, served: Served
) -> None:
    engines.ollama.ps_gate = Gate()
    with OpenCall("POST", f"{served.comfy}/prompt", blur_workflow()):
        engines.ollama.ps_gate.wait_reached()
        served.wait_state("image")
    served.wait_state("idle")
    engines.ollama.ps_gate.open()

    assert chat(served).status == 200
    assert engines.record.calls("POST /prompt") == []


def test_an_image_whose_client_left_is_followed_to_its_end(
    engines: Engines, served: Served
) -> None:
    nodes = engines.comfy.hold_jobs()
    engines.comfy.fail("POST /prompt", answer_later := _AnswerLater(), times=1)
    with OpenCall("POST", f"{served.comfy}/prompt", blur_workflow()):
        answer_later.gate.wait_reached()
    answer_later.gate.open()
    nodes.wait_reached()

    waiting = background(lambda: chat(served))
    served.wait_waiting("llm", 1)
    nodes.open()

    assert waiting.result().status == 200
    assert_in_order(engines, "POST /prompt", "POST /free", "POST /api/chat")
    engines.oracle.assert_exclusive()


class _AnswerLater:
    """A fault that queues the job and keeps ComfyUI's answer back at a gate."""

    def __init__(self) -> None:
        self.gate = Gate()

    async def __call__(self, request, handler):  # noqa: ANN001, ANN204 - a `Fault`
        response = await handler(request)
        await self.gate.passing()
        return response


def test_a_client_that_leaves_mid_stream_stops_the_upstream(
    engines: Engines, served: Served
) -> None:
    engines.ollama.hold_token(2)
    with open_chat(served) as leaving:
        assert leaving.line()
        served.wait_state("llm", llm_inflight=1)

    served.wait_state("idle", llm_inflight=0)
    wait_until(lambda: engines.record.calls("POST /api/chat")[0].aborted, what="abort")
    wait_until(lambda: engines.ollama.usage.computing == 0, what="end of computing")


@pytest.mark.parametrize("held", ["before", "after"])
def test_a_client_that_leaves_an_answer_in_one_piece_stops_the_upstream(
    engines: Engines, served: Served, held: str
) -> None:
    token = engines.ollama.hold_token(0 if held == "before" else 2)
    with open_chat(served, stream=False):
        token.wait_reached()

    served.wait_state("idle", llm_inflight=0)
    wait_until(lambda: engines.ollama.usage.computing == 0, what="end of computing")


@pytest.mark.parametrize(
    ("body", "status"), [({"prompt": {}}, 400), (b"{not json", 500), ({"prompt": {"1": {}}}, 400)]
)
def test_a_refused_prompt_releases_the_lock_at_once(
    engines: Engines, served: Served, body: object, status: int
) -> None:
    direct = call("POST", f"{engines.comfy.url}/prompt", body)

    through = call("POST", f"{served.comfy}/prompt", body)

    assert (through.status, through.body) == (direct.status, direct.body)
    assert through.status == status
    assert through.header("Content-Type") == direct.header("Content-Type")
    served.wait_state("idle")
    assert engines.record.calls("POST /free") == []
    assert chat(served).status == 200


def test_a_job_that_comfyui_lost_in_a_restart_releases_the_lock(
    engines: Engines, served: Served
) -> None:
    hold_an_image(engines, served)
    waiting = background(lambda: chat(served))
    served.wait_waiting("llm", 1)

    engines.kill(engines.comfy)
    engines.restart(engines.comfy)

    assert waiting.result().status == 200
    wait_until(lambda: served.metrics()['gpulock_image_jobs_total{result="lost"}'] == 1)


def test_a_job_that_the_history_never_shows_releases_the_lock(
    engines: Engines, served: Served
) -> None:
    engines.comfy.history_blank = True
    assert post_image(served).status == 200

    assert chat(served).status == 200
    assert served.metrics()['gpulock_image_jobs_total{result="lost"}'] == 1
    assert len(engines.record.calls("POST /free")) == 1


def test_an_interrupted_job_releases_the_lock(engines: Engines, served: Served) -> None:
    nodes = hold_an_image(engines, served)

    assert call("POST", f"{served.comfy}/interrupt").status == 200
    nodes.open()

    served.wait_state("idle")
    assert served.metrics()['gpulock_image_jobs_total{result="interrupted"}'] == 1


def test_a_job_whose_node_fails_releases_the_lock(engines: Engines, served: Served) -> None:
    assert post_image(served, width=16384, height=16384, batch_size=4096).status == 200

    assert chat(served).status == 200
    assert served.metrics()['gpulock_image_jobs_total{result="error"}'] == 1
    assert_in_order(engines, "POST /prompt", "POST /free", "POST /api/chat")


def test_a_job_over_its_time_releases_the_lock(engines: Engines, serve: Serve) -> None:
    served = serve(JOB_TIMEOUT="300ms")
    nodes = hold_an_image(engines, served)

    assert chat(served).status == 200
    assert served.metrics()['gpulock_image_jobs_total{result="timeout"}'] == 1
    assert engines.record.calls("POST /interrupt") == []
    nodes.open()


def test_a_job_over_its_time_is_interrupted_where_that_is_asked(
    engines: Engines, serve: Serve
) -> None:
    served = serve(JOB_TIMEOUT="300ms", JOB_TIMEOUT_ACTION="interrupt")
    hold_an_image(engines, served)

    wait_until(lambda: engines.record.calls("POST /interrupt"), what="interrupt")

    prompt_id = next(iter(engines.record.calls("POST /interrupt"))).json()["prompt_id"]
    assert engines.comfy.jobs.running is not None
    assert prompt_id == engines.comfy.jobs.running.prompt_id


def test_an_unreachable_ollama_does_not_stop_an_image(engines: Engines, served: Served) -> None:
    engines.kill(engines.ollama)

    assert post_image(served).status == 200

    served.wait_state("idle")
    assert_in_order(engines, "POST /prompt", "POST /free")


def test_an_ollama_that_never_unloads_does_not_stop_an_image(
    engines: Engines, serve: Serve
) -> None:
    served = serve(UNLOAD_TIMEOUT="300ms")
    engines.ollama.ps_stuck = True

    assert post_image(served).status == 200

    served.wait_state("idle")
    assert served.metrics()["gpulock_unload_seconds_count"] == 1
    assert any(line.get("level", "").lower() == "warning" for line in served.lines())


def test_a_process_list_that_hangs_does_not_stop_an_image(engines: Engines, serve: Serve) -> None:
    served = serve(UNLOAD_TIMEOUT="300ms")
    engines.ollama.ps_gate = Gate()

    assert post_image(served).status == 200

    engines.ollama.ps_gate.open()
    served.wait_state("idle")


def test_an_old_ollama_is_unloaded_through_embed(engines: Engines, served: Served) -> None:
    engines.ollama.fail("unload", old_embeddings)
    embedding = {"model": "nomic-embed-text", "input": "one"}
    assert call("POST", f"{served.ollama}/api/embed", embedding).status == 200

    assert post_image(served).status == 200

    last = engines.record.calls("POST /api/embed")[-1].json()
    assert (last["model"], last["keep_alive"]) == ("nomic-embed-text:latest", 0)
    assert_in_order(engines, "unload nomic-embed-text:latest", "POST /api/embed", "POST /prompt")
    engines.oracle.assert_exclusive()


def test_a_chat_that_waits_too_long_is_refused_with_the_reason(
    engines: Engines, serve: Serve
) -> None:
    served = serve(LLM_WAIT_TIMEOUT="200ms")
    nodes = hold_an_image(engines, served)

    refused = chat(served)

    assert refused.status == 503
    assert int(refused.header("Retry-After") or 0) > 0
    assert refused.header(
        "Content-Type",
    ).startswith("application/json")
    assert "error" in refused.json()
    assert engines.record.calls("POST /api/chat") == []
    nodes.open()
