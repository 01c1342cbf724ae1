"""What a request that cannot have the card, or the memory to wait for it, is told."""

import asyncio

import pytest

from ocgpu.server import upload
from tests.server.held import held, metric, request
from tests.server.inloop import RawUpstream, connect, exchange, proxy
from tests.server.requests import CHAT, Engine, json_of, status_of, waiting

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

UNTIL_GONE = b"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"


async def test_a_wait_that_takes_too_long_is_a_503_that_says_when_and_why() -> None:
    async with held(llm_wait_timeout=0.05) as card:
        answer = await exchange(card.url, CHAT)

        assert status_of(answer) == 503
        assert b"\r\nretry-after: 5\r\n" in answer
        assert b"\r\ncontent-type: application/json\r\n" in answer
        assert json_of(answer) == {
            "error": "the gpu was not free within 0.05s",
            "reason": "timeout",
        }
        assert card.heads == [], "it never reached the engine"


async def test_refusals_are_counted_by_reason_and_are_no_waits() -> None:
    async with held(max_queue=1, max_waiting_bytes=20) as card:
        waiter = await card.open(CHAT)
        await waiting(card.url, waiting={"llm": 1, "image": 0, "bytes": 4})
        for body in (b"", b" " * 17, b" " * 21):
            await exchange(card.url, request("/api/chat", body))

        for reason in ("queue_full", "body_memory", "body_too_large"):
            assert await refused(card.url, reason) == 1, reason
        assert await refused(card.url, "timeout") == 0
        assert await metric(card.url, 'gpulock_lock_wait_seconds_count{kind="llm"}') == 0
        card.let_go.set()
        await waiter.rest()
        await waiter.close()


async def test_a_wait_that_took_too_long_is_counted_apart() -> None:
    async with held(llm_wait_timeout=0.01) as card:
        await exchange(card.url, CHAT)

        assert await refused(card.url, "timeout") == 1
        assert await metric(card.url, 'gpulock_lock_wait_seconds_count{kind="llm"}') == 0
        assert await metric(card.url, 'gpulock_left_total{kind="llm"}') == 0


async def refused(url: str, reason: str) -> float:
    return await metric(url, f'gpulock_refused_total{{kind="llm",reason="{reason}"}}')


async def test_a_client_that_leaves_is_counted_as_one_who_left() -> None:
    async with held() as card:
        client = await card.open(CHAT)
        await waiting(card.url, waiting={"llm": 1, "image": 0, "bytes": 4})

        await client.close()
        await waiting(card.url, waiting={"llm": 0, "image": 0, "bytes": 2})

        assert await metric(card.url, 'gpulock_left_total{kind="llm"}') == 1
        assert await metric(card.url, 'gpulock_lock_wait_seconds_count{kind="llm"}') == 0


async def test_bodies_are_bounded_together_while_they_wait_and_while_they_are_served() -> None:
    engine = Engine()
    async with RawUpstream(engine) as raw, proxy(raw.url, max_waiting_bytes=3) as bound:
        url = bound.ollama_url
        chat = asyncio.ensure_future(exchange(url, CHAT))
        await waiting(url, llm_inflight=1, waiting={"llm": 0, "image": 0, "bytes": 2})

        answer = await exchange(url, CHAT)

        assert status_of(answer) == 503
        assert b"\r\nretry-after: 5\r\n" in answer
        assert json_of(answer)["reason"] == "body_memory"
        engine.go_on.set()
        assert (await chat).endswith(b"chat")
        await waiting(url, waiting={"llm": 0, "image": 0, "bytes": 0})
        assert status_of(await exchange(url, CHAT)) == 200


async def test_a_body_that_can_never_be_had_is_refused_unsent_and_without_a_when() -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url, max_waiting_bytes=100) as bound:
        client = await connect(bound.ollama_url)
        await client.write(
            b"POST /api/chat HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Length: 101\r\nExpect: 100-continue\r\n\r\n"
        )

        answer = await client.rest()
        await client.close()

    assert status_of(answer) == 413
    assert b"retry-after" not in answer
    assert json_of(answer) == {
        "error": "request body too large: over 100 bytes; raise `MAX_WAITING_BYTES`",
        "reason": "body_too_large",
    }


@pytest.mark.parametrize("framing", ["declared", "chunked"])
async def test_a_client_that_reads_only_after_it_sent_all_gets_its_refusal(framing: str) -> None:
    size = 20_000_000
    head = b"POST /api/chat HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    body = b"x" * size
    if framing == "declared":
        sent = head + b"Content-Length: %d\r\n\r\n" % size + body
    else:
        sent = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % size + body + b"\r\n0\r\n\r\n"
    async with RawUpstream(Engine()) as raw, proxy(raw.url, max_waiting_bytes=1000) as bound:
        answer = await exchange(bound.ollama_url, sent)

        assert status_of(answer) == 413
        await waiting(bound.ollama_url, waiting={"llm": 0, "image": 0, "bytes": 0})


async def test_an_upload_that_stalls_is_a_408_and_gives_its_memory_back() -> None:
    async with RawUpstream(Engine()) as raw, proxy(raw.url, stall_timeout=0.2) as bound:
        client = await connect(bound.ollama_url)
        await client.write(UNTIL_GONE + b"12345")
        await waiting(bound.ollama_url, waiting={"llm": 0, "image": 0, "bytes": 5})

        answer = await client.rest()
        await client.close()

        assert status_of(answer) == 408
        assert json_of(answer)["reason"] == "body_timeout"
        await waiting(bound.ollama_url, waiting={"llm": 0, "image": 0, "bytes": 0})


async def test_an_upload_that_trickles_is_a_408_and_gives_its_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upload, "_UPLOAD_SECONDS", 0.5)
    async with RawUpstream(Engine()) as raw, proxy(raw.url, stall_timeout=5.0) as bound:
        client = await connect(bound.ollama_url)
        head = b"POST /api/chat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        await client.write(head)

        async def trickle() -> None:
            while True:
                await client.write(b"1\r\nx\r\n")
                await asyncio.sleep(0.02)

        trickling = asyncio.ensure_future(trickle())
        answer = await client.read(len(b"HTTP/1.1 408"))
        trickling.cancel()
        await client.close()

        assert answer == b"HTTP/1.1 408"
        await waiting(bound.ollama_url, waiting={"llm": 0, "image": 0, "bytes": 0})
