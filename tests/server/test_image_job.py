"""The life of an image job where it is most likely to go wrong, against engines played by hand."""

import asyncio
import gzip
from collections.abc import Callable

import pytest

from ocgpu.server.arbiter import Kind, State
from ocgpu.server.engines.comfy_documents import JobResult
from ocgpu.server.engines.ollama import Ollama
from ocgpu.server.relay.client import HttpUpstream
from ocgpu.server.relay.control import Control
from ocgpu.server.relay.upstream import UpstreamError
from tests.server.inloop import RawUpstream
from tests.server.script import PROMPT, Bench, Script, answer

Make = Callable[..., Bench]


async def test_the_lock_is_held_until_the_job_has_ended_and_was_freed(
    script: Script, make: Make
) -> None:
    bench = make()
    script.models = ["m"]
    script.queue = ["a"]

    reply = await bench.post()

    assert reply.body == b'{"prompt_id":"a"}'
    assert bench.admission.counts.state is State.IMAGE
    script.end("a")
    await bench.idle()
    # Whether ComfyUI is there comes first: a model is not unloaded for one that is gone.
    assert script.calls.index("GET /queue") < script.calls.index("GET /api/ps")
    assert script.calls.index("POST /api/generate") < script.calls.index("POST /prompt")
    assert script.calls[-1] == "POST /free"
    assert bench.results == {"done": 1}


@pytest.mark.parametrize(
    ("status", "result"),
    [
        ({}, JobResult.DONE),
        ({"status_str": "error", "completed": False}, JobResult.ERROR),
        (
            {
                "status_str": "error",
                "completed": False,
                "messages": [["execution_start", {}], ["execution_interrupted", {}]],
            },
            JobResult.INTERRUPTED,
        ),
    ],
)
async def test_the_end_of_a_job_is_read_from_its_history(
    script: Script, make: Make, status: dict, result: JobResult
) -> None:
    bench = make()
    script.queue = ["a"]
    await bench.post()

    script.end("a", **status)

    await bench.idle()
    assert bench.results == {result.value: 1}


async def test_a_job_in_neither_queue_nor_history_is_lost_at_once(make: Make) -> None:
    bench = make()

    await bench.post()

    await bench.idle()
    assert bench.results == {"lost": 1}


async def test_an_old_history_entry_of_the_same_id_is_not_the_end(
    script: Script, make: Make
) -> None:
    bench = make()
    script.history["a"] = {"status": {"completed": True}}
    script.queue = ["a"]
    await bench.post()

    await script.reached("GET /queue", 3)

    assert bench.admission.counts.state is State.IMAGE
    script.queue.clear()
    await bench.idle()


async def test_an_id_of_the_client_is_quoted(script: Script, make: Make) -> None:
    bench = make()
    script.prompt = answer(b'{"prompt_id":"a/../b?c"}')

    await bench.post()
    await bench.idle()

    assert "GET /history/a%2F..%2Fb%3Fc" in script.calls


async def test_a_job_over_its_time_is_released_and_counted(script: Script, make: Make) -> None:
    bench = make(job_timeout=0.1)
    script.queue = ["a"]

    await bench.post()

    await bench.idle()
    assert bench.results == {"timeout": 1}
    assert "POST /interrupt" not in script.calls


async def test_a_job_over_its_time_is_interrupted_where_that_is_asked(
    script: Script, make: Make
) -> None:
    bench = make(job_timeout=0.1, job_timeout_action="interrupt")
    script.queue = ["a"]
    await bench.post()
    await script.reached("POST /interrupt")
    assert bench.admission.counts.state is State.IMAGE

    script.end("a", status_str="error", completed=False)

    await bench.idle()
    assert bench.results == {"timeout": 1}


@pytest.mark.parametrize(
    "prompt",
    [
        answer(b'{"error":{}}', b"400 Bad"),
        answer(b'{"prompt_id":"a"}', b"202 Later"),
        answer(b'{"node_errors":{}}'),
        answer(b"[]"),
        answer(b"no json"),
        answer(b"{}", b"500 Error"),
    ],
)
async def test_an_answer_without_a_job_releases_at_once_and_passes(
    script: Script, make: Make, prompt: bytes
) -> None:
    bench = make()
    script.prompt = prompt

    reply = await bench.post()

    await bench.idle()
    assert prompt.endswith(reply.body)
    assert "POST /free" not in script.calls
    assert bench.results == {}


async def test_a_compressed_answer_is_understood_and_passes_as_it_is(
    script: Script, make: Make
) -> None:
    bench = make()
    body = gzip.compress(b'{"prompt_id":"a"}')
    script.prompt = answer(body, b"200 OK", b"Content-Encoding: gzip")

    reply = await bench.post()

    assert reply.body == body
    await bench.idle()
    assert bench.results == {"lost": 1}


async def test_an_answer_that_breaks_off_makes_us_wait_for_what_runs(
    script: Script, make: Make
) -> None:
    bench = make()
    script.prompt = None
    script.queue = ["unknown"]

    with pytest.raises(UpstreamError):
        await bench.post()

    await script.reached("GET /queue", 3)
    assert bench.admission.counts.state is State.IMAGE
    script.end("unknown")
    await bench.idle()
    assert bench.results == {"done": 1}
    assert script.calls[-1] == "POST /free"


async def test_a_client_that_leaves_during_the_unload_starts_no_job(
    script: Script, make: Make
) -> None:
    bench = make()
    script.gates["GET /api/ps"] = asyncio.Event()
    client = asyncio.ensure_future(bench.post())
    await script.reached("GET /api/ps")

    client.cancel()

    await bench.idle()
    assert "POST /prompt" not in script.calls


async def test_a_client_that_leaves_before_the_first_step_leaves_no_lock(
    script: Script, make: Make
) -> None:
    bench = make()
    grant = await bench.admission.acquire(Kind.IMAGE)
    client = asyncio.ensure_future(bench.jobs.post(grant, PROMPT))
    await asyncio.sleep(0)

    client.cancel()

    await bench.idle()
    assert "POST /prompt" not in script.calls


async def test_a_client_that_leaves_after_the_prompt_was_sent_leaves_the_job(
    script: Script, make: Make
) -> None:
    bench = make()
    script.queue = ["a"]
    script.gates["POST /prompt"] = asyncio.Event()
    client = asyncio.ensure_future(bench.post())
    await script.reached("POST /prompt")

    client.cancel()
    script.gates["POST /prompt"].set()

    await script.reached("GET /queue")
    assert bench.admission.counts.state is State.IMAGE
    script.end("a")
    await bench.idle()
    assert bench.results == {"done": 1}


async def test_images_in_a_row_unload_and_free_once(script: Script, make: Make) -> None:
    bench = make()
    script.queue = ["a"]
    await bench.post()
    second = asyncio.ensure_future(bench.post())
    await asyncio.sleep(0)

    script.end("a")
    await second

    await bench.idle()
    assert script.count("GET /api/ps") == 1
    assert script.count("POST /free") == 1
    assert script.count("POST /prompt") == 2


async def test_a_batch_of_0_unloads_and_frees_every_time(script: Script, make: Make) -> None:
    bench = make(batch=0)
    script.queue = ["a"]
    await bench.post()
    second = asyncio.ensure_future(bench.post())
    await asyncio.sleep(0)

    script.end("a")
    await second

    await bench.idle()
    assert script.count("GET /api/ps") == 2
    assert script.count("POST /free") == 2


async def test_a_card_handed_over_to_a_refused_prompt_is_freed(script: Script, make: Make) -> None:
    bench = make()
    script.queue = ["a"]
    await bench.post()
    second = asyncio.ensure_future(bench.post())
    await asyncio.sleep(0)
    script.prompt = answer(b"{}", b"400 Bad")

    script.end("a")
    await second

    await bench.idle()
    assert script.count("POST /free") == 1


async def test_a_card_handed_over_to_a_client_that_left_is_freed(
    script: Script, make: Make
) -> None:
    bench = make()
    grant = await bench.admission.acquire(Kind.IMAGE)
    left = asyncio.ensure_future(bench.post())
    await asyncio.sleep(0)

    assert grant.finish()
    left.cancel()

    await bench.idle()
    assert script.calls == ["POST /free"]


async def test_jobs_from_before_the_start_are_waited_for(script: Script, make: Make) -> None:
    bench = make()
    script.foreign = ["old"]

    await bench.jobs.adopt()

    assert bench.admission.counts.state is State.IMAGE
    await script.reached("GET /queue", 3)
    assert bench.admission.counts.state is State.IMAGE
    script.end("old")
    await bench.idle()
    assert script.calls[-1] == "POST /free"
    assert bench.results == {"done": 1}


async def test_a_start_before_an_idle_comfyui_takes_no_lock(make: Make) -> None:
    bench = make()

    await bench.jobs.adopt()

    assert bench.admission.counts.state is State.IDLE
    assert not bench.admission.transitions


async def test_an_engine_that_is_down_does_not_hold_an_image_up(script: Script, make: Make) -> None:
    bench = make()
    async with RawUpstream(script) as gone:
        url = gone.url
    dead = HttpUpstream(url, 1.0)
    bench.jobs.card._ollama = Ollama(Control(dead))

    await bench.post()

    await bench.idle()
    assert bench.results == {"lost": 1}
    await dead.close()


async def test_models_that_stay_do_not_hold_an_image_up(script: Script, make: Make) -> None:
    bench = make(unload_timeout=0.1)
    script.stuck = ["m"]

    await bench.post()

    await bench.idle()
    assert bench.metrics.unload_timeouts == 1
    assert bench.results == {"lost": 1}
