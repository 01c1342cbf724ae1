"""`async with Lease`: waits that leave the loop free, and cancellation that leaves nothing held."""

import asyncio
import os
import random

import pytest

from ocgpu import Lease, LeaseBusyError, LeaseError, LeaseTimeoutError, lease_status
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")


def count(kind: str) -> int:
    return len(os.listdir(f"/proc/self/{kind}"))  # noqa: PTH208  # names are all that is wanted


async def until_waiting(number: int = 1) -> None:
    async with asyncio.timeout(10):
        while len(lease_status().waiters) != number:  # noqa: ASYNC110  # other processes set no event
            await asyncio.sleep(0.002)


async def test_async_with_takes_and_gives_back() -> None:
    async with Lease() as lease:
        assert lease.held
        assert not Lease().try_acquire()
    assert Lease().try_acquire()


async def test_the_loop_goes_on_while_a_task_waits() -> None:
    holder, waiter = Lease(), Lease()
    holder.acquire()
    task = asyncio.create_task(waiter.aacquire())
    await until_waiting()
    assert not task.done()

    holder.release()

    await asyncio.wait_for(task, 20)
    assert waiter.held


async def test_timeouts_raise_as_they_do_without_async() -> None:
    with Lease():
        with pytest.raises(LeaseTimeoutError) as late:
            await Lease().aacquire(timeout=0.01)
        with pytest.raises(LeaseBusyError):
            await Lease(timeout=0).aacquire()
        assert lease_status().waiters == []
    assert late.value.holder == os.getpid()


async def test_release_ends_a_waiting_task() -> None:
    waiter = Lease()
    with Lease():
        task = asyncio.create_task(waiter.aacquire())
        await until_waiting()
        waiter.release()
        with pytest.raises(LeaseError, match="released while waiting"):
            await asyncio.wait_for(task, 20)


async def test_a_task_cancelled_at_any_moment_does_not_hold() -> None:
    chance = random.Random(1)  # noqa: S311  # moments, not secrets
    waiter = Lease()
    handles = threads = 0
    for turn in range(100):
        holder = Lease()
        holder.acquire()
        task = asyncio.create_task(waiter.aacquire())
        loop = asyncio.get_running_loop()
        # The release and the cancellation come in either order, or in the same moment.
        loop.call_later(chance.random() * 0.004, holder.release)
        loop.call_later(chance.random() * 0.004, task.cancel)

        granted = not (await asyncio.gather(task, return_exceptions=True))[0]

        assert waiter.held == granted
        waiter.release()
        holder.release()
        del holder
        if turn == 20:
            handles, threads = count("fd"), count("task")

    assert Lease().try_acquire()
    assert lease_status().waiters == []
    wait_until(lambda: count("task") <= threads, what="waiting threads to end")
    assert count("fd") <= handles


async def test_a_task_cancelled_by_a_time_limit_around_it_does_not_hold() -> None:
    waiter = Lease()
    with Lease():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await waiter.aacquire()
        assert lease_status().waiters == []
    assert not waiter.held


async def test_many_tasks_take_turns() -> None:
    inside = 0
    worst = 0

    async def work() -> None:
        nonlocal inside, worst
        async with Lease():
            inside += 1
            worst = max(worst, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(work() for _ in range(50)))

    assert worst == 1
