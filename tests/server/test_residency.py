"""The machine's lease as serve holds it, with other holders in processes of their own."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest

import ocgpu
from ocgpu.server.refusal import RefusedError
from ocgpu.server.residency import Residency, lease_key
from tests.holders import Holder, holder

pytestmark = pytest.mark.usefixtures("gpu_dir")


@asynccontextmanager
async def residency(key: str, wait_timeout: float = 0.0) -> AsyncIterator[Residency]:
    made = Residency(key, None, wait_timeout)
    try:
        yield made
    finally:
        await made.close()


async def within(work: Awaitable[object], seconds: float = 10.0) -> object:
    async with asyncio.timeout(seconds):
        return await work


async def test_many_requests_share_one_lease_until_it_is_given_up(gpu_key: str) -> None:
    async with residency(gpu_key) as held:
        await within(asyncio.gather(*(held.share() for _ in range(20))))
        assert (held.mode, len(ocgpu.lease_status().holders)) == ("shared", 1)

        held.give_up()
        held.give_up()

        assert held.mode is None
        assert not ocgpu.lease_status().held


async def test_an_image_gives_the_shared_lease_up_and_takes_the_other(gpu_key: str) -> None:
    async with residency(gpu_key) as held:
        await within(held.share())
        await within(held.take())
        assert held.mode == ocgpu.lease_status().mode == "exclusive"

        held.give_up()
        await within(held.share())
        assert held.mode == ocgpu.lease_status().mode == "shared"


@pytest.mark.parametrize("mode", ["share", "take"])
async def test_who_waits_too_long_for_a_stranger_is_told_who_it_is(gpu_key: str, mode: str) -> None:
    with holder() as stranger:
        async with residency(gpu_key, 0.2) as held:
            with pytest.raises(RefusedError) as refusal:
                await within(getattr(held, mode)())

            assert refusal.value.reason == "lease"
            assert f"(pid {stranger.pid}): a test" in refusal.value.message
            assert refusal.value.retry_after
            assert held.mode is None
            await _waiters(0)


async def test_a_lease_that_comes_free_goes_to_who_waits(gpu_key: str) -> None:
    with holder() as stranger:
        async with residency(gpu_key) as held:
            sharing = [asyncio.ensure_future(held.share()) for _ in range(3)]
            await _waiters(1)
            stranger.kill()

            await within(asyncio.gather(*sharing))

            assert held.mode == "shared"


async def test_nobody_stays_in_the_queue_when_all_who_waited_have_left(gpu_key: str) -> None:
    with holder():
        async with residency(gpu_key) as held:
            sharing = [asyncio.ensure_future(held.share()) for _ in range(3)]
            await _waiters(1)
            for task in sharing[:2]:
                task.cancel()
            await asyncio.gather(*sharing[:2], return_exceptions=True)
            assert len(ocgpu.lease_status().waiters) == 1

            sharing[2].cancel()
            await asyncio.gather(*sharing, return_exceptions=True)

            await _waiters(0)


async def test_who_comes_in_the_moment_the_last_waiter_leaves_waits_in_its_own_right(
    gpu_key: str,
) -> None:
    with holder() as stranger:
        async with residency(gpu_key) as held:

            async def leave_and_come_again() -> None:
                with contextlib.suppress(asyncio.CancelledError):
                    await held.share()
                await held.share()

            coming = asyncio.ensure_future(leave_and_come_again())
            await _waiters(1)
            coming.cancel()
            await asyncio.sleep(0)
            stranger.kill()

            await within(coming)

            assert held.mode == "shared"


async def test_a_cancelled_image_leaves_the_queue(gpu_key: str) -> None:
    with holder("shared"):
        async with residency(gpu_key) as held:
            taking = asyncio.ensure_future(held.take())
            await _waiters(1)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

            await _waiters(0)
            assert held.mode is None


async def test_a_stranger_who_waits_is_told_of_once(gpu_key: str) -> None:
    async with residency(gpu_key) as held:
        told = asyncio.Event()
        held.on_wanted = told.set
        await within(held.share())
        assert not held.wanted
        stranger = Holder()
        try:
            await within(told.wait())
            assert held.wanted

            held.give_up()

            await asyncio.to_thread(stranger.wait_held)
            assert ocgpu.lease_status().holders[0].pid == stranger.pid
        finally:
            stranger.end()


async def test_what_is_resident_without_a_request_takes_the_lease_only_if_it_is_free(
    gpu_key: str,
) -> None:
    async with residency(gpu_key) as held:
        with holder():
            assert not held.try_share()
            assert ocgpu.lease_status().waiters == []
        assert held.try_share()
        assert held.mode == "shared"
        assert held.try_share()


async def test_without_a_key_nothing_is_taken_and_nobody_waits() -> None:
    without = Residency(None, "no GPU on this machine", 1.0)
    await within(without.share())
    await within(without.take())
    without.give_up()

    assert without.mode is None
    assert without.document() == {"enabled": False, "reason": "no GPU on this machine"}
    await without.close()


@pytest.mark.parametrize("mode", ["share", "take"])
async def test_a_place_that_cannot_be_used_stops_nobody(
    gpu_key: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCGPU_DIR", "/proc/nowhere")
    async with residency(gpu_key) as held:
        await within(getattr(held, mode)())

        assert held.mode is None
        assert not held.enabled
        assert "/proc/nowhere" in held.document()["reason"]


async def _waiters(number: int) -> None:
    deadline = time.monotonic() + 10
    while len(ocgpu.lease_status().waiters) != number:
        assert time.monotonic() < deadline, ocgpu.lease_status()
        await asyncio.sleep(0.005)


def test_a_folder_that_cannot_be_used_is_known_before_the_first_request(
    gpu_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lease_key(gpu_key, on=True, local=True) == (gpu_key, None)
    monkeypatch.setenv("OCGPU_DIR", "/proc/nowhere")

    key, reason = lease_key(gpu_key, on=True, local=True)

    assert key is None
    assert "no folder that can be written to: `/proc/nowhere`" in str(reason)
