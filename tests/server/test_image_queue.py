"""Jobs in ComfyUI that are not ours, or that we cannot name, and the lock around them."""

import asyncio
from collections.abc import Callable

import pytest

from ocgpu.server.arbiter import Kind, State
from ocgpu.server.engines import comfyui
from ocgpu.server.relay.upstream import UpstreamError
from tests.server.script import Bench, Script, answer

Make = Callable[..., Bench]


async def test_jobs_of_others_are_waited_for_before_ours_goes_out(
    script: Script, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    script.foreign = ["f", "g"]
    client = asyncio.ensure_future(bench.post())
    await script.reached("GET /queue", 3)
    chat = asyncio.ensure_future(bench.admission.acquire(Kind.LLM))
    script.end("f")
    await script.reached("GET /queue", 5)
    assert script.count("POST /prompt") == 0

    script.end("g")
    await client

    (await chat).release()
    assert script.calls.index("POST /prompt") < script.calls.index("POST /free")
    assert bench.results == {"lost": 1}
    assert sum("came past the proxy" in line for line in caplog.messages) == 1


async def test_jobs_of_others_that_outlast_the_time_are_waited_for_once(
    script: Script, make: Make
) -> None:
    bench = make(job_timeout=0.2)
    script.foreign = ["f"]
    await bench.post()
    await bench.idle()
    assert script.count("GET /queue") > 2
    again = len(script.calls)

    await bench.post()

    assert script.calls[again : script.calls.index("POST /prompt", again)].count("GET /queue") == 2
    await bench.idle()


async def test_a_client_that_leaves_while_others_are_waited_for_starts_no_job(
    script: Script, make: Make
) -> None:
    bench = make()
    script.foreign = ["f"]
    client = asyncio.ensure_future(bench.post())
    await script.reached("GET /queue", 2)

    client.cancel()

    await bench.idle()
    assert "POST /prompt" not in script.calls


async def test_a_job_that_was_given_up_holds_no_other_one_up(script: Script, make: Make) -> None:
    bench = make(job_timeout=0.1)
    script.queue = ["a"]
    await bench.post()
    await bench.idle()
    script.prompt = answer(b'{"prompt_id":"b"}')
    script.foreign, script.queue = ["a"], []
    began = len(script.calls)

    await bench.post()

    assert script.calls[began:].count("GET /queue") <= 2
    await bench.idle()
    assert bench.results == {"timeout": 1, "lost": 1}


@pytest.mark.parametrize(
    "prompt",
    [
        answer(b'{"prompt_id":["a"]}'),
        answer(b'{"number":1}'),
        answer(b"no json"),
        answer(b'{"prompt_id":"a"}', b"202 Later"),
        answer(b"?", b"200 OK", b"Content-Encoding: br"),
    ],
)
async def test_an_accepted_prompt_without_a_name_is_looked_for_in_the_queue(
    script: Script, make: Make, prompt: bytes
) -> None:
    bench = make()
    script.prompt = prompt
    script.queue = ["a"]

    await bench.post()
    await script.reached("GET /queue", 3)
    assert bench.admission.counts.state is State.IMAGE

    script.end("a")
    await bench.idle()
    assert bench.results == {"done": 1}
    assert script.calls[-1] == "POST /free"


async def test_a_number_as_the_name_of_a_job_is_followed(script: Script, make: Make) -> None:
    bench = make()
    script.prompt = answer(b'{"prompt_id":7}')
    script.queue = [7]
    await bench.post()
    await script.reached("GET /queue", 3)
    assert bench.admission.counts.state is State.IMAGE

    script.queue = []

    await bench.idle()
    assert "GET /history/7" in script.calls


async def test_an_answer_that_breaks_off_before_a_queue_that_hangs_keeps_the_lock(
    script: Script, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    script.prompt = None
    script.queue = ["unknown"]
    script.gates["POST /prompt"] = asyncio.Event()
    client = asyncio.ensure_future(bench.post())
    await script.reached("POST /prompt")
    monkeypatch.setattr(comfyui, "_CALL_SECONDS", 0.05)
    script.gates["GET /queue"] = asyncio.Event()
    script.gates["POST /prompt"].set()
    with pytest.raises(UpstreamError):
        await client

    await script.reached("GET /queue", 3)
    assert bench.admission.counts.state is State.IMAGE

    script.gates.pop("GET /queue").set()
    script.end("unknown")
    await bench.idle()
    assert script.calls[-1] == "POST /free"
