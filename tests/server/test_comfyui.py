"""When a job of ComfyUI has really ended: over real sockets, against one that can misbehave."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable

import pytest

from ocgpu.server.engines import comfyui as engine
from ocgpu.server.engines import following
from ocgpu.server.engines.comfy_documents import (
    JobResult,
    Queue,
)
from ocgpu.server.engines.comfyui import ComfyUI, UnreadableError
from ocgpu.server.engines.following import follow, wait_until_gone
from ocgpu.server.relay.client import HttpUpstream
from ocgpu.server.relay.control import Control
from tests.fakes import Engines, Gate
from tests.fakes.faults import answer, stall
from tests.recordings import blur_workflow
from tests.server.client import call

PATIENCE = 20.0


@pytest.fixture
async def comfyui(engines: Engines) -> AsyncIterator[ComfyUI]:
    upstream = HttpUpstream(engines.comfy.url, 1.0)
    yield ComfyUI(Control(upstream))
    await upstream.close()


def queue_job(engines: Engines, **fields: object) -> str:
    """Queue the recorded workflow past every proxy; gives its id."""
    posted = call("POST", f"{engines.comfy.url}/prompt", {**blur_workflow(), **fields})
    assert posted.status == 200, posted.body
    prompt_id: str = posted.json()["prompt_id"]
    return prompt_id


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the fakes live in another thread
            await asyncio.sleep(0.005)


def looks(engines: Engines) -> int:
    return len(engines.record.calls("GET /api/jobs")) + len(engines.record.calls("GET /queue"))


async def test_a_job_is_followed_from_the_queue_to_its_history(
    engines: Engines, comfyui: ComfyUI
) -> None:
    nodes = engines.comfy.hold_jobs()
    prompt_id = queue_job(engines)
    following_it = asyncio.ensure_future(follow(comfyui, prompt_id, PATIENCE, "release"))
    await until(lambda: looks(engines) > 2)
    assert not following_it.done()

    nodes.open()

    assert await following_it is JobResult.DONE
    # No document with graphs in it was asked for but the one that tells the end.
    assert engines.record.calls("GET /queue") == []
    assert len(engines.record.calls("GET /history/*")) == 1


async def test_a_job_between_its_last_node_and_its_history_goes_on(
    engines: Engines, comfyui: ComfyUI
) -> None:
    engines.comfy.end_gate = Gate()
    prompt_id = queue_job(engines)
    following_it = asyncio.ensure_future(follow(comfyui, prompt_id, PATIENCE, "release"))
    await until(lambda: engines.comfy.end_gate.waiting == 1 and looks(engines) > 2)

    assert not following_it.done()

    engines.comfy.end_gate.open()
    assert await following_it is JobResult.DONE


@pytest.mark.parametrize("old", [False, True])
async def test_an_id_that_was_used_before_is_followed_to_its_new_end(
    engines: Engines, comfyui: ComfyUI, old: bool
) -> None:
    engines.comfy.old = old
    prompt_id = queue_job(engines, prompt_id=str(uuid.uuid4()))
    assert await follow(comfyui, prompt_id, PATIENCE, "release") is JobResult.DONE
    nodes = engines.comfy.hold_jobs()
    queue_job(engines, prompt_id=prompt_id, prompt=blur_workflow(color=1)["prompt"])
    before = looks(engines)

    following_it = asyncio.ensure_future(follow(comfyui, prompt_id, PATIENCE, "release"))

    await until(lambda: looks(engines) > before + 2)
    assert not following_it.done()
    nodes.open()
    assert await following_it is JobResult.DONE


async def test_an_old_comfyui_is_asked_for_its_queue_until_it_was_restarted(
    engines: Engines, comfyui: ComfyUI
) -> None:
    engines.comfy.old = True
    prompt_id = queue_job(engines)

    assert await follow(comfyui, prompt_id, PATIENCE, "release") is JobResult.DONE
    await comfyui.queue()

    assert len(engines.record.calls("GET /api/jobs")) == 1
    engines.kill(engines.comfy)
    assert await follow(comfyui, prompt_id, 0.1, "release") is JobResult.TIMEOUT
    engines.comfy.old = False
    engines.restart(engines.comfy)
    engines.record.clear()
    await comfyui.queue()
    assert engines.record.names() == ["GET /api/jobs"]


async def test_a_list_of_jobs_that_fails_is_replaced_by_the_queue(
    engines: Engines, comfyui: ComfyUI
) -> None:
    engines.comfy.fail("GET /api/jobs", answer(500), times=1)

    assert await comfyui.queue() == Queue([], [])
    assert await comfyui.queue() == Queue([], [])

    assert engines.record.names() == ["GET /api/jobs", "GET /queue", "GET /api/jobs"]


@pytest.mark.parametrize("prompt_id", ["a/../b?c", "ü/月#%2F", "x" * 300])
async def test_any_text_may_be_an_id(engines: Engines, comfyui: ComfyUI, prompt_id: str) -> None:
    engines.comfy.old = True

    queue_job(engines, prompt_id=prompt_id)

    assert await follow(comfyui, prompt_id, PATIENCE, "release") is JobResult.DONE


async def test_a_job_that_was_deleted_while_it_waited_is_lost_at_once(
    engines: Engines, comfyui: ComfyUI
) -> None:
    nodes = engines.comfy.hold_jobs()
    queue_job(engines)
    nodes.wait_reached()
    waiting = queue_job(engines)
    following_it = asyncio.ensure_future(follow(comfyui, waiting, PATIENCE, "release"))
    await until(lambda: looks(engines) > 1)

    call("POST", f"{engines.comfy.url}/queue", {"clear": True})

    async with asyncio.timeout(3):
        assert await following_it is JobResult.LOST


async def test_a_history_that_was_wiped_is_an_end(engines: Engines, comfyui: ComfyUI) -> None:
    prompt_id = queue_job(engines)
    await until(lambda: prompt_id in engines.comfy.jobs.history)

    call("POST", f"{engines.comfy.url}/history", {"clear": True})

    assert await follow(comfyui, prompt_id, PATIENCE, "release") is JobResult.LOST


async def test_a_restart_is_waited_for_and_forgets_the_job(
    engines: Engines, comfyui: ComfyUI, caplog: pytest.LogCaptureFixture
) -> None:
    engines.comfy.hold_jobs()
    prompt_id = queue_job(engines)
    following_it = asyncio.ensure_future(follow(comfyui, prompt_id, PATIENCE, "release"))
    await until(lambda: looks(engines) > 0)

    await asyncio.to_thread(engines.kill, engines.comfy)
    await until(lambda: any("image job" in line for line in caplog.messages))
    assert not following_it.done()
    await asyncio.to_thread(engines.restart, engines.comfy)

    assert await following_it is JobResult.LOST


async def test_a_comfyui_that_does_not_come_back_is_given_up(
    engines: Engines, comfyui: ComfyUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_REFUSED_SECONDS", 0.2)
    engines.comfy.hold_jobs()
    prompt_id = queue_job(engines)
    await asyncio.to_thread(engines.kill, engines.comfy)

    async with asyncio.timeout(5):
        assert await follow(comfyui, prompt_id, PATIENCE, "release") is JobResult.LOST


@pytest.mark.parametrize(
    "fault",
    [
        answer(200, b"<html>log in</html>"),
        answer(200, b"[]"),
        answer(200, b"{}"),
        answer(502, b"bad gateway"),
        answer(401),
    ],
)
async def test_answers_that_are_none_of_comfyui_s_are_given_up(
    engines: Engines, comfyui: ComfyUI, monkeypatch: pytest.MonkeyPatch, fault: object
) -> None:
    monkeypatch.setattr(following, "_UNREADABLE_SECONDS", 0.2)
    engines.comfy.hold_jobs()
    prompt_id = queue_job(engines)
    # `{}` is a history like any other, so that one is made unreadable in its own way.
    for name in ("GET /api/jobs", "GET /queue"):
        engines.comfy.fail(name, fault)
    engines.comfy.fail("GET /history/*", answer(200, b"[]"))

    async with asyncio.timeout(5):
        assert await follow(comfyui, prompt_id, PATIENCE, "release") is JobResult.LOST


async def test_a_history_alone_tells_the_end_of_a_job_and_not_that_it_is_gone(
    engines: Engines, comfyui: ComfyUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_UNREADABLE_SECONDS", 0.05)
    for name in ("GET /api/jobs", "GET /queue"):
        engines.comfy.fail(name, answer(200, b'{"queue_running":7}'))
    nodes = engines.comfy.hold_jobs()
    prompt_id = queue_job(engines)
    following_it = asyncio.ensure_future(follow(comfyui, prompt_id, PATIENCE, "release"))
    await until(lambda: len(engines.record.calls("GET /history/*")) > 3)
    assert not following_it.done()

    nodes.open()

    assert await following_it is JobResult.DONE


@pytest.mark.parametrize("how", ["silent", "504"])
async def test_a_comfyui_that_takes_long_to_answer_is_not_given_up(
    engines: Engines, comfyui: ComfyUI, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(following, "_UNREADABLE_SECONDS", 0.0)
    monkeypatch.setattr(following, "_REFUSED_SECONDS", 0.0)
    monkeypatch.setattr(engine, "_CALL_SECONDS", 0.05)
    nodes = engines.comfy.hold_jobs()
    prompt_id = queue_job(engines)
    fault = stall(Gate()) if how == "silent" else answer(504)
    for name in ("GET /api/jobs", "GET /queue", "GET /history/*"):
        engines.comfy.fail(name, fault)
    following_it = asyncio.ensure_future(follow(comfyui, prompt_id, PATIENCE, "release"))
    await until(lambda: looks(engines) > 3)
    assert not following_it.done()

    engines.comfy.heal()
    nodes.open()

    assert await following_it is JobResult.DONE


async def test_a_job_over_its_time_is_interrupted_by_its_id(
    engines: Engines, comfyui: ComfyUI
) -> None:
    nodes = engines.comfy.hold_jobs()
    prompt_id = queue_job(engines)
    nodes.wait_reached()
    following_it = asyncio.ensure_future(follow(comfyui, prompt_id, 0.1, "interrupt"))
    await until(lambda: bool(engines.record.calls("POST /interrupt")))
    assert not following_it.done()

    nodes.open()

    assert await following_it is JobResult.TIMEOUT
    assert engines.record.calls("POST /interrupt")[0].json() == {"prompt_id": prompt_id}
    assert await comfyui.outcome(prompt_id) is JobResult.INTERRUPTED


async def test_a_job_over_its_time_that_still_waits_is_taken_out_and_nobody_is_interrupted(
    engines: Engines, comfyui: ComfyUI
) -> None:
    nodes = engines.comfy.hold_jobs()
    running = queue_job(engines)
    nodes.wait_reached()
    waiting = queue_job(engines)

    assert await follow(comfyui, waiting, 0.1, "interrupt") is JobResult.TIMEOUT

    assert engines.record.calls("POST /interrupt") == []
    assert (await comfyui.queue()).ids == [running]
    nodes.open()
    assert await follow(comfyui, running, PATIENCE, "release") is JobResult.DONE


async def test_a_job_that_ignores_the_interrupt_is_released_and_told(
    engines: Engines,
    comfyui: ComfyUI,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(following, "_INTERRUPT_SECONDS", 0.2)
    engines.comfy.deaf = True
    nodes = engines.comfy.hold_jobs()
    prompt_id = queue_job(engines)
    nodes.wait_reached()

    with caplog.at_level(logging.WARNING):
        assert await follow(comfyui, prompt_id, 0.1, "interrupt") is JobResult.TIMEOUT

    assert "image job: it goes on in spite of the interrupt" in caplog.messages
    assert (await comfyui.queue()).running == [prompt_id]


async def test_the_wait_for_others_ends_with_them_or_with_its_time(
    engines: Engines, comfyui: ComfyUI
) -> None:
    nodes = engines.comfy.hold_jobs()
    prompt_id = queue_job(engines)

    assert not await wait_until_gone(comfyui, [prompt_id], 0.1)
    nodes.open()
    assert await wait_until_gone(comfyui, [prompt_id], PATIENCE)


async def test_a_queue_that_says_nothing_is_no_empty_queue(
    engines: Engines, comfyui: ComfyUI
) -> None:
    for name in ("GET /api/jobs", "GET /queue"):
        engines.comfy.fail(name, answer(200, b"{}"))

    with pytest.raises(UnreadableError):
        await comfyui.queue()
