"""The fakes record what they are asked and misbehave as told."""

import http.client

import pytest

from tests.fakes import Engines, Gate
from tests.fakes.faults import answer, cut_after, drop, old_embeddings, stall
from tests.recordings import blur_workflow
from tests.server.client import OpenCall, background, call
from tests.waiting import wait_until

CHAT = {"model": "llama3.2", "messages": [{"role": "user", "content": "hello"}]}


def test_calls_to_both_are_recorded_in_one_order(engines: Engines) -> None:
    call("POST", f"{engines.ollama.url}/api/chat?x=%2F", CHAT, {"X-Twice": "a"})
    call("POST", f"{engines.comfy.url}/prompt", blur_workflow())
    call("POST", f"{engines.ollama.url}/api/generate", {"model": "llama3.2", "keep_alive": 0})

    assert engines.record.names() == ["POST /api/chat", "POST /prompt", "unload llama3.2"]
    chat = engines.record.calls("POST /api/chat")[0]
    assert chat.raw_path == "/api/chat?x=%2F"
    assert chat.header("x-twice") == ["a"]
    assert chat.json() == CHAT
    assert (chat.status, chat.aborted) == (200, False)


def test_the_oracle_sees_two_kinds_meet(engines: Engines) -> None:
    token = engines.ollama.hold_token(0)
    node = engines.comfy.hold_jobs()
    chat = background(lambda: call("POST", f"{engines.ollama.url}/api/chat", CHAT))
    token.wait_reached()
    engines.oracle.assert_exclusive()

    call("POST", f"{engines.comfy.url}/prompt", blur_workflow())
    node.wait_reached()
    token.open()
    node.open()

    assert chat.result().status == 200
    assert engines.oracle.computing_overlaps
    assert engines.oracle.resident_overlaps
    with pytest.raises(AssertionError, match="two kinds on the card"):
        engines.oracle.assert_exclusive()


def test_the_oracle_is_content_with_one_after_the_other(engines: Engines) -> None:
    call("POST", f"{engines.ollama.url}/api/chat", CHAT)
    call("POST", f"{engines.ollama.url}/api/generate", {"model": "llama3.2", "keep_alive": 0})
    wait_until(lambda: engines.ollama.usage.resident_bytes == 0)
    call("POST", f"{engines.comfy.url}/prompt", blur_workflow())
    wait_until(lambda: engines.oracle.uses("image") == 5)

    engines.oracle.assert_exclusive()
    assert engines.oracle.uses("llm") == 1


def test_a_client_that_leaves_is_recorded(engines: Engines) -> None:
    gate = engines.ollama.hold_token(1)
    with OpenCall("POST", f"{engines.ollama.url}/api/chat", CHAT) as opened:
        assert b'"the"' in opened.line()
        gate.wait_reached()

    wait_until(lambda: engines.record.calls("POST /api/chat")[0].aborted)
    assert gate.waiting == 0


def test_a_killed_fake_refuses_and_forgets(engines: Engines) -> None:
    gate = engines.comfy.hold_jobs()
    call("POST", f"{engines.comfy.url}/prompt", blur_workflow())
    gate.wait_reached()

    engines.kill(engines.comfy)
    with pytest.raises(ConnectionRefusedError):
        call("GET", f"{engines.comfy.url}/queue")
    engines.restart(engines.comfy)

    nothing = {"queue_running": [], "queue_pending": []}
    assert call("GET", f"{engines.comfy.url}/queue").json() == nothing
    assert engines.comfy.usage.resident_bytes == 0


def test_faults_answer_as_often_as_asked(engines: Engines) -> None:
    gate = Gate()
    url = f"{engines.ollama.url}/api/version"
    engines.ollama.fail("GET /api/version", answer(503, b"busy"), times=1)
    engines.ollama.fail("GET /api/version", drop, times=1)
    engines.ollama.fail("GET /api/version", cut_after(20), times=1)
    engines.ollama.fail("GET /api/version", stall(gate), times=1)

    assert (call("GET", url).status) == 503
    with pytest.raises(http.client.RemoteDisconnected):
        call("GET", url)
    with pytest.raises(http.client.IncompleteRead) as cut:
        call("GET", url)
    assert len(cut.value.partial) == 20
    engines.ollama.fail("GET /api/tags", cut_after(20, chunked=True))
    with pytest.raises(http.client.IncompleteRead) as chunks:
        call("GET", f"{engines.ollama.url}/api/tags")
    assert len(chunks.value.partial) == 20
    stalled = background(lambda: call("GET", url))
    gate.wait_reached()
    gate.open()
    assert stalled.result().status == 200


def test_the_lists_can_lie(engines: Engines) -> None:
    engines.ollama.ps_stuck = True
    engines.comfy.history_blank = True
    engines.comfy.queue_blank = True
    gate = engines.comfy.hold_jobs()
    prompt_id = call("POST", f"{engines.comfy.url}/prompt", blur_workflow()).json()["prompt_id"]
    gate.wait_reached()

    assert call("GET", f"{engines.comfy.url}/queue").json()["queue_running"] == []
    gate.open()
    wait_until(lambda: prompt_id in engines.comfy.jobs.history)

    assert call("GET", f"{engines.comfy.url}/history/{prompt_id}").json() == {}
    assert call("GET", f"{engines.ollama.url}/api/ps").json()["models"]


def test_an_old_ollama_unloads_an_embedding_model_through_embed_only(engines: Engines) -> None:
    engines.ollama.fail("unload", old_embeddings)
    model = {"model": "nomic-embed-text", "keep_alive": 0}

    assert call("POST", f"{engines.ollama.url}/api/generate", model).status == 400
    answered = call("POST", f"{engines.ollama.url}/api/embed", {**model, "input": "x"})

    assert answered.status == 200
    wait_until(lambda: not engines.ollama.scheduler.loaded())
