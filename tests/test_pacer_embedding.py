"""The ways to embed a pacer: coroutines, iterators, units, threads, forked children."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

import ocgpu
from ocgpu import Pacer
from tests.at_work import at_work, state_of
from tests.processes import run_forking
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")


@pytest.mark.parametrize("schedule", ["turn", "grid"])
async def test_astep_waits_without_blocking_the_loop(schedule: str) -> None:
    with Pacer(schedule=schedule) as pacer, Pacer() as other, at_work(other):
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.001)
                turns += 1

        counter = asyncio.create_task(count())
        waited = 0.0
        while waited < 0.1:
            waited += await pacer.astep()
            await asyncio.sleep(0.002)
        counter.cancel()

        assert turns >= 10


async def test_a_cancelled_astep_gives_up_its_place() -> None:
    with Pacer() as pacer, Pacer() as other:
        other.step()
        waiting = asyncio.create_task(pacer.astep())
        await asyncio.to_thread(wait_until, lambda: state_of(pacer) == "waiting")

        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

        assert state_of(pacer) != "waiting"
        assert [other.step() for _ in range(100)] == [0.0] * 100


async def test_a_pacer_may_be_left_by_async_with() -> None:
    async with Pacer() as pacer:
        assert pacer.enabled

    assert ocgpu.peers().peers == []


def test_pace_steps_before_each_item_and_idles_at_the_end() -> None:
    with Pacer() as pacer:
        active = []
        for _ in pacer.pace(range(3)):
            own = pacer.snapshot().self
            assert own is not None
            active.append(own.active)

        own = pacer.snapshot().self
        assert own is not None
        assert (active, own.active, own.steps) == ([True] * 3, False, 4)


async def test_pace_iterates_asynchronously_too() -> None:
    async def tokens() -> AsyncIterator[int]:
        for token in range(3):
            yield token

    with Pacer() as pacer:
        assert [token async for token in pacer.pace(tokens())] == [0, 1, 2]


def test_pace_refuses_the_wrong_kind_of_loop() -> None:
    async def tokens() -> AsyncIterator[int]:
        yield 1

    with Pacer() as pacer, pytest.raises(TypeError, match="async for"):
        iter(pacer.pace(tokens()))


def test_a_unit_steps_before_and_is_done_after() -> None:
    with Pacer() as pacer:
        with pacer.unit():
            pass
        with pytest.raises(RuntimeError), pacer.unit():
            raise RuntimeError

        own = pacer.snapshot().self
        assert own is not None
        assert own.steps == 2


def test_threads_share_a_pacer() -> None:
    with Pacer() as pacer, Pacer() as other, at_work(other):

        def work() -> None:
            for _ in range(50):
                with pacer.unit():
                    pass

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

        own = pacer.snapshot().self
        assert own is not None
        assert own.steps == 200


def test_a_turn_does_not_end_in_the_middle_of_another_threads_unit() -> None:
    overlaps = []
    computing: set[str] = set()

    def unit(pacer: Pacer, name: str) -> None:
        with pacer.unit():
            computing.add(threading.current_thread().name)
            if {other.split("-")[0] for other in computing} != {name}:
                overlaps.append(set(computing))
            time.sleep(0.003)
            computing.discard(threading.current_thread().name)

    def loop(pacer: Pacer, name: str) -> None:
        deadline = time.monotonic() + 2.0
        with pacer.request():
            while time.monotonic() < deadline:
                unit(pacer, name)

    with Pacer() as a, Pacer() as b:
        threads = [
            threading.Thread(target=loop, args=(pacer, name), name=f"{name}-{index}")
            for pacer, name in ((a, "a"), (b, "b"))
            for index in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

        steps = [peer.steps for peer in ocgpu.peers().peers]

    assert min(steps) > 100
    assert overlaps == []


def test_a_forked_child_joins_anew_and_does_not_disturb_its_parent() -> None:
    program = (
        "import os, time\n"
        "from ocgpu import Pacer, peers\n"
        "parent = Pacer(2.0, name='model')\n"
        "parent.step()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    before = len(peers().peers)\n"
        "    parent.idle()\n"
        "    after = [(p.slot, p.pid == os.getpid(), p.weight) for p in peers().peers]\n"
        "    ok = (before, after) == (1, [(0, False, 2.0), (1, True, 2.0)])\n"
        "    ok = ok and parent.slot == 1 and parent.enabled\n"
        "    parent.leave()\n"
        "    os._exit(0 if ok and len(peers().peers) == 1 else 1)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "print(status, [p.slot for p in peers().peers if p.alive], parent.slot, parent.enabled)\n"
    )
    done = run_forking(program)

    assert done.stdout == "0 [0] 0 True\n", done.stderr


def test_a_forked_child_that_does_not_use_its_copy_does_not_join() -> None:
    program = (
        "import os, sys\n"
        "from ocgpu import Pacer, peers\n"
        "parent = Pacer()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    parent.leave()\n"
        "    code = parent.step() or parent.enabled or len(peers().peers) - 1\n"
        "    del parent\n"
        "    sys.exit(int(code))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), parent.enabled)\n"
    )
    done = run_forking(program)

    assert done.stdout == "0 True\n", done.stderr
