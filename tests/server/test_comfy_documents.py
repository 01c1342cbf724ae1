"""What is read out of ComfyUI's documents, and what is not."""

import json

import pytest

from ocgpu.server.engines.comfy_documents import (
    JobResult,
    Queue,
    read_history,
    read_jobs,
    read_prompt_id,
    read_queue,
)
from ocgpu.server.relay.control import Reply
from tests.recordings import events

DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"queue_running":[]}',
        b'{"queue_running":[],"queue_pending":7}',
        b'{"queue_running":[],"queue_pending":[[1]]}',
        b'{"queue_running":["a"],"queue_pending":[]}',
        b'{"queue_running":' + DEEP,
    ],
)
def test_a_queue_of_another_form_tells_nothing(body: bytes) -> None:
    assert read_queue(body) is None


def test_a_queue_is_read_whatever_stands_beside_the_ids() -> None:
    body = b'{"queue_running":[[1,"a",{"x":[1]},{},[]]],"queue_pending":[[2,7],["x","b"]],"z":0}'

    assert read_queue(body) == Queue(["a"], ["7", "b"])


def test_a_list_of_jobs_that_ignores_the_filter_is_filtered() -> None:
    jobs = [{"id": s, "status": s} for s in ("pending", "in_progress", "completed", "failed")]

    assert read_jobs(json.dumps({"jobs": jobs}).encode()) == Queue(["in_progress"], ["pending"])


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"jobs":7}', b'{"jobs":[{"id":5}]}', b'{"jobs":[],"pagination":{"has_more":true}}'],
)
def test_a_list_of_jobs_of_another_form_or_in_part_tells_nothing(body: bytes) -> None:
    assert read_jobs(body) is None


@pytest.mark.parametrize(
    ("name", "result"),
    [("success_ws", "done"), ("cached", "done"), ("interrupt_running", "interrupted")],
)
def test_recorded_histories_are_read(name: str, result: str) -> None:
    bodies = [
        json.dumps(event["body"]).encode()
        for event in events(name, "http")
        if event["path"].startswith("/history/") and event["body"]
    ]

    assert bodies
    for body in bodies:
        assert set((read_history(body) or {}).values()) == {JobResult(result)}


@pytest.mark.parametrize("messages", [7, "x", [1, {}], [[]], {"a": 1}])
def test_odd_messages_of_a_failed_job_are_an_error(messages: object) -> None:
    status = {"status_str": "error", "messages": messages}

    assert read_history(json.dumps({"a": {"status": status}}).encode()) == {"a": JobResult.ERROR}


@pytest.mark.parametrize(
    ("body", "prompt_id"),
    [
        (b'{"prompt_id":"a","node_errors":{"3":{}}}', "a"),
        (b'{"prompt_id":7}', "7"),
        (b'{"prompt_id":true}', None),
        (b'{"prompt_id":""}', None),
        (b'{"prompt_id":null}', None),
        (b'{"prompt_id":["a"]}', None),
        (b'{"prompt_id":"\\ud800"}', None),
        (b"[]", None),
    ],
)
def test_an_id_is_text_or_a_number(body: bytes, prompt_id: str | None) -> None:
    assert read_prompt_id(Reply(200, [], body)) == prompt_id
