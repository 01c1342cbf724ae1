"""`WARM_MODEL`: loaded when nobody wants the card, and never in anybody's way."""

import asyncio
import math
from collections.abc import Callable

import pytest

from ocgpu.server.arbiter import Kind
from tests.fakes import Engines
from tests.server.client import background
from tests.server.jobs import assert_in_order, chat, post_image
from tests.server.script import Bench, Script, answer
from tests.server.served import Served
from tests.waiting import wait_until

Make = Callable[..., Bench]
Serve = Callable[..., Served]
MODEL = "llama3.2:latest"


async def test_the_model_is_loaded_after_the_image_was_freed(script: Script, make: Make) -> None:
    bench = make(warm_model="m")

    await bench.post()

    await script.reached("POST /api/generate")
    assert script.calls.index("POST /free") < script.calls.index("POST /api/generate")
    await bench.idle()


async def test_the_model_is_not_loaded_while_a_chat_runs(script: Script, make: Make) -> None:
    bench = make(warm_model="m", batch=0)
    script.queue = ["a"]
    await bench.post()
    waiting = asyncio.ensure_future(bench.admission.acquire(Kind.LLM))
    await asyncio.sleep(0)

    script.end("a")
    grant = await waiting
    await script.reached("POST /free")
    await asyncio.sleep(0.5)
    assert script.calls[-1] == "POST /free"

    grant.release()

    await script.reached("POST /api/generate")
    await bench.idle()


async def test_a_load_that_the_image_interrupts_is_over_before_the_image_begins(
    script: Script, make: Make
) -> None:
    bench = make(warm_model="m")
    await bench.post()
    script.gates["POST /api/generate"] = asyncio.Event()
    await script.reached("POST /api/generate")
    assert bench.admission.counts.llm_inflight == 1

    async with asyncio.timeout(5):
        await bench.post()

    assert script.count("POST /prompt") == 2


@pytest.mark.parametrize("reply", [answer(b"{}", b"404 Not Found"), None])
async def test_a_model_that_cannot_be_loaded_leaves_the_lock(
    script: Script, make: Make, caplog: pytest.LogCaptureFixture, reply: bytes | None
) -> None:
    bench = make(warm_model="m")
    usual = script.answer
    script.answer = lambda name, body: reply if "generate" in name else usual(name, body)

    await bench.post()
    await script.reached("POST /api/generate")

    await bench.idle()
    async with asyncio.timeout(5):
        while not any("warm model" in line for line in caplog.messages):  # noqa: ASYNC110 - a log
            await asyncio.sleep(0.005)


async def test_the_end_of_serve_ends_a_load(script: Script, make: Make) -> None:
    bench = make(warm_model="m")
    script.gates["POST /api/generate"] = asyncio.Event()
    await bench.post()
    await script.reached("POST /api/generate")

    bench.admission.close()

    await bench.idle()


def test_a_chat_joins_a_load_and_an_image_ends_it(engines: Engines, serve: Serve) -> None:
    served = serve(WARM_MODEL=MODEL)
    assert post_image(served).status == 200
    wait_until(lambda: engines.ollama.scheduler.loaded(), what="warm model")
    loaded = engines.ollama.scheduler.loaded()[0]
    assert (loaded.model.name, math.isinf(loaded.keep_alive)) == (MODEL, True)
    assert chat(served).status == 200

    # The next load takes longer than anybody would wait.
    engines.ollama.scheduler.load_seconds = 1000.0
    assert post_image(served).status == 200
    served.wait_state("llm", llm_inflight=1)
    wait_until(lambda: engines.ollama.usage.resident_bytes > 0, what="a load under way")
    image = background(lambda: post_image(served))

    assert image.result().status == 200
    loads = [c for c in engines.record.calls("POST /api/generate") if c.json()["keep_alive"] == -1]
    assert loads[1].aborted
    assert_in_order(engines, "POST /prompt", "POST /api/generate", "POST /prompt")
    engines.oracle.assert_exclusive()
