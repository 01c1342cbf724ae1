"""A real `ocgpu serve` between real clients and the fakes: streams, and an image job's life."""

import json
from collections.abc import Callable
from typing import Any

import ollama
import openai
from websockets.sync.client import ClientConnection, connect

from tests.fakes import Engines
from tests.recordings import blur_workflow, recorded_websocket_types
from tests.server.client import background, call
from tests.server.jobs import MESSAGES, MODEL, assert_in_order, chat, open_chat, post_image
from tests.server.served import Served
from tests.waiting import wait_until

Serve = Callable[..., Served]
TOKENS = 4  # of an answer of the fakes


def test_the_ollama_client_has_each_chunk_before_the_next_is_sent(
    engines: Engines, served: Served
) -> None:
    gates = [engines.ollama.hold_token(index) for index in range(1, TOKENS)]

    with ollama.Client(host=served.ollama) as client:
        stream = client.chat(MODEL, MESSAGES, stream=True)
        words = [next(stream).message.content]
        for gate in gates:
            gate.wait_reached()
            assert engines.record.calls("POST /api/chat")[0].ended is None
            gate.open()
            words.append(next(stream).message.content)
        last = next(stream)

    assert words == ["the", " card", " is", " free"]
    assert (last.done, last.done_reason) == (True, "stop")


def test_the_openai_client_has_each_chunk_before_the_next_is_sent(
    engines: Engines, served: Served
) -> None:
    gates = [engines.ollama.hold_token(index) for index in range(1, TOKENS)]

    with openai.OpenAI(base_url=f"{served.ollama}/v1", api_key="none") as client:
        stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        words = [next(stream).choices[0].delta.content]
        for gate in gates:
            gate.wait_reached()
            assert engines.record.calls("POST /v1/chat/completions")[0].ended is None
            gate.open()
            words.append(next(stream).choices[0].delta.content)
        last = list(stream)[-1]

    assert words == ["the", " card", " is", " free"]
    assert last.choices[0].finish_reason == "stop"


def read_to_end_of_job(socket: ClientConnection) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    while not messages or messages[-1]["data"].get("node", "") is not None:
        messages.append(json.loads(socket.recv(timeout=20)))
    return messages


def test_a_chat_waits_until_the_image_job_is_finished_and_freed(
    engines: Engines, served: Served
) -> None:
    assert chat(served).status == 200
    nodes = engines.comfy.hold_jobs()

    with connect(f"{served.comfy.replace('http', 'ws')}/ws?clientId=client-a") as socket:
        posted = call("POST", f"{served.comfy}/prompt", blur_workflow())
        nodes.wait_reached()
        second = background(lambda: chat(served))
        served.wait_waiting("llm", 1)
        served.wait_state("image", llm_inflight=0, image_pending=False)
        assert len(engines.record.calls("POST /api/chat")) == 1
        nodes.open()
        messages = read_to_end_of_job(socket)

    assert second.result().status == 200
    assert posted.status == 200
    assert posted.json().keys() == {"prompt_id", "number", "node_errors"}
    types = [message["type"] for message in messages]
    assert [kind for kind in types if kind != "progress_state"] == recorded_websocket_types(
        "success_ws"
    )
    assert {
        message["data"]["prompt_id"] for message in messages if "prompt_id" in message["data"]
    } == {posted.json()["prompt_id"]}
    assert_in_order(
        engines,
        "POST /api/chat",
        "GET /api/ps",
        "unload llama3.2:latest",
        "GET /api/ps",
        "POST /prompt",
        "GET /api/jobs",
        "GET /history/*",
        "POST /free",
        "POST /api/chat",
    )
    free = engines.record.calls("POST /free")[0]
    assert free.json() == {"unload_models": True, "free_memory": True}
    engines.oracle.assert_exclusive()


def test_an_image_waits_for_the_chats_and_new_chats_wait_for_the_image(
    engines: Engines, served: Served
) -> None:
    token = engines.ollama.hold_token(1)
    with open_chat(served) as first, open_chat(served) as second:
        assert first.line()
        assert second.line()
        served.wait_state("llm", llm_inflight=2)
        image = background(lambda: post_image(served))
        served.wait_state("llm", llm_inflight=2, image_pending=True)
        third = background(lambda: chat(served))
        served.wait_waiting("llm", 1)
        assert engines.record.calls("POST /prompt") == []

        token.open()
        assert first.answer().body.count(b"\n") == 4
        assert second.answer().body.count(b"\n") == 4

    assert image.result().status == 200
    assert third.result().status == 200
    assert_in_order(engines, "POST /api/chat", "POST /prompt", "POST /free", "POST /api/chat")
    served.wait_state("idle", llm_inflight=0, image_pending=False)
    engines.oracle.assert_exclusive()


def test_images_run_one_after_the_other_in_the_order_of_coming(
    engines: Engines, served: Served
) -> None:
    nodes = engines.comfy.hold_jobs()
    first = background(lambda: post_image(served, color=1))
    nodes.wait_reached()
    second = background(lambda: post_image(served, color=2))
    served.wait_waiting("image", 1)
    third = background(lambda: post_image(served, color=3))
    served.wait_waiting("image", 2)
    assert len(engines.record.calls("POST /prompt")) == 1

    nodes.open()

    ids = [future.result().json()["prompt_id"] for future in (first, second, third)]
    wait_until(lambda: engines.record.calls("POST /free"), what="free after the last")
    assert list(engines.comfy.jobs.history) == ids
    colours = [
        made.json()["prompt"]["1"]["inputs"]["color"]
        for made in engines.record.calls("POST /prompt")
    ]
    assert colours == [1, 2, 3]
    served.wait_state("idle")


def test_images_in_a_row_are_freed_once_unless_batching_is_off(
    engines: Engines, serve: Serve
) -> None:
    served = serve(IMAGE_BATCH="0")
    nodes = engines.comfy.hold_jobs()
    first = background(lambda: post_image(served, color=1))
    nodes.wait_reached()
    second = background(lambda: post_image(served, color=2))
    served.wait_waiting("image", 1)

    nodes.open()

    assert (first.result().status, second.result().status) == (200, 200)
    served.wait_state("idle", image_pending=False)
    assert_in_order(engines, "POST /prompt", "POST /free", "POST /prompt", "POST /free")


def test_a_warm_model_is_loaded_again_after_an_image(engines: Engines, serve: Serve) -> None:
    served = serve(WARM_MODEL=MODEL)

    assert post_image(served).status == 200

    wait_until(lambda: engines.ollama.scheduler.loaded(), what="warm model")
    warm = engines.record.calls("POST /api/generate")[-1].json()
    assert (warm["model"], warm["keep_alive"], warm.get("prompt", "")) == (MODEL, -1, "")
    assert_in_order(engines, "POST /free", "POST /api/generate")
    engines.oracle.assert_exclusive()


def test_a_chat_with_the_model_of_the_cloud_passes_an_image(
    engines: Engines, served: Served
) -> None:
    nodes = engines.comfy.hold_jobs()
    post_image(served)
    nodes.wait_reached()

    assert chat(served, model="gpt-oss:120b-cloud").status == 200
    served.wait_state("image")
    nodes.open()
    served.wait_state("idle")
