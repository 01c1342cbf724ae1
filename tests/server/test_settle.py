"""Freed means measured: real processes that listen, a driver that says what a test wants."""

import asyncio
import contextlib
import ipaddress
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ocgpu.server import engine_processes, settle
from ocgpu.server.engine_processes import is_descendant, listening_pids, local_addresses
from ocgpu.server.metrics import Metrics
from ocgpu.server.settle import Fall, Settler, Settling
from tests.fakes.nvml import GIB, Card, FakeNvml, Process, three_gpus
from tests.waiting import wait_until

MIB = 1 << 20
# Listens, starts a child that has a child, and says its port. The last one holds the memory.
ENGINE = """
import socket, subprocess, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], 0), family=family)
sleep = "import time; time.sleep(100)"
between = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
child = subprocess.Popen([sys.executable, "-c", between])
print(listener.getsockname()[1], flush=True)
time.sleep(100)
"""


class LocalEngine:
    """A process that listens, with a grandchild.

    Attributes:
        port: Where it listens.
        pid: Its own.
        worker: The grandchild's.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        command = [sys.executable, "-c", ENGINE, host]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.pid = self._process.pid
        own = psutil.Process(self.pid)
        family = wait_until(lambda: (f := own.children(recursive=True)) and len(f) == 2 and f)
        self.worker = family[-1].pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            for process in (*own.children(recursive=True), own):
                process.kill()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def local() -> Iterator[LocalEngine]:
    engine = LocalEngine()
    yield engine
    engine.end()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = three_gpus()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
async def begin(local: LocalEngine) -> AsyncIterator[Callable[..., object]]:
    """Measures the local engine; keywords are of the settler."""
    metrics = Metrics()
    begun: list[Settling] = []

    async def start(*, timeout: float = 20.0, kept: int = 0, url: str = "") -> Settling:
        begun.append(await Settler(timeout, metrics).begin("engine", url or local.url, kept))
        return begun[-1]

    start.metrics = metrics
    yield start
    for settling in begun:
        settling.close()


def observed(metrics: Metrics) -> float:
    return {name: n for name, _, n in metrics.settle.samples({})}["_count"]


def holds(nvml: FakeNvml, pid: int, *sizes: int | None) -> None:
    """Have a process hold so much of the first cards, beside a neighbour that never frees."""
    for card, size in zip(nvml.cards, sizes, strict=False):
        card.computing = [Process(pid, size), Process(os.getpid(), 20 * GIB)]


async def still_waits(waiting: "asyncio.Future[bool]", nvml: FakeNvml) -> None:
    """See several looks at the driver, after which the wait is still on."""
    for _ in range(5):
        before = nvml.reads
        async with asyncio.timeout(10):
            while nvml.reads == before:  # noqa: ASYNC110 - the driver is asked in a thread
                await asyncio.sleep(0.005)
    assert not waiting.done()


async def test_it_waits_until_the_worker_of_the_engine_has_freed_its_memory(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object]
) -> None:
    holds(nvml, local.worker, 6 * GIB, 2 * GIB)
    settling = await begin()
    waiting = asyncio.ensure_future(settling.wait(told=True))
    await still_waits(waiting, nvml)
    holds(nvml, local.worker, 5 * GIB, 0)
    await still_waits(waiting, nvml)

    holds(nvml, local.worker, 300 * MIB, 0)

    assert await waiting
    assert observed(begin.metrics) == 1
    settling.close()
    await asyncio.to_thread(wait_until, lambda: nvml.started == 0)


async def test_a_process_that_has_ended_holds_nothing(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object]
) -> None:
    holds(nvml, local.worker, 6 * GIB)
    settling = await begin()

    nvml.cards[0].computing = []
    psutil.Process(local.worker).kill()

    assert await settling.wait(told=True)


async def test_memory_that_stays_is_told_and_held_for_the_time_out_only(
    local: LocalEngine,
    nvml: FakeNvml,
    begin: Callable[..., object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    holds(nvml, local.worker, 6 * GIB)
    settling = await begin(timeout=0.3)

    assert not await settling.wait(told=True)

    warning = caplog.records[-1].__dict__
    assert warning["message"] == "memory was not freed, going on"
    assert (warning["before_mib"], warning["after_mib"]) == (6 * 1024, 6 * 1024)


async def test_memory_that_never_rests_is_held_for_the_time_out_only(
    local: LocalEngine,
    nvml: FakeNvml,
    begin: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holds(nvml, local.worker, 6 * GIB)
    settling = await begin(timeout=0.6)
    sizes = itertools.cycle((1 * GIB, 2 * GIB))

    def restless(card: Card) -> list[Process]:
        return [Process(local.worker, next(sizes))] if card is nvml.cards[0] else []

    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", restless)

    async with asyncio.timeout(10):
        await settling.wait(told=True)


async def test_what_an_engine_keeps_is_waited_for_until_it_rests(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object]
) -> None:
    holds(nvml, local.worker, 6 * GIB)
    settling = await begin()
    waiting = asyncio.ensure_future(settling.wait(told=True))

    holds(nvml, local.worker, 1 * GIB)

    assert await waiting


async def test_an_engine_that_holds_but_its_context_is_not_waited_for(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object]
) -> None:
    holds(nvml, local.worker, 450 * MIB)
    settling = await begin(kept=512 * MIB)

    async with asyncio.timeout(2):
        assert await settling.wait(told=True)
    assert observed(begin.metrics) == 0


@pytest.mark.parametrize("hidden", ["no sizes", "foreign pids", "no pids"])
async def test_memory_that_is_not_told_by_process_is_looked_for_on_the_card(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object], hidden: str
) -> None:
    for card in nvml.cards:
        card.free = 0
    if hidden == "no sizes":
        holds(nvml, local.worker, None)
    elif hidden == "foreign pids":
        nvml.cards[0].computing = [Process(2**22 + 5, 6 * GIB)]
    settling = await begin()
    waiting = asyncio.ensure_future(settling.wait(told=True))
    await still_waits(waiting, nvml)

    nvml.cards[0].free = 6 * GIB

    assert await waiting
    assert observed(begin.metrics) == 1


async def test_a_card_that_nobody_was_told_to_free_is_not_waited_for(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object]
) -> None:
    holds(nvml, local.worker, None)
    settling = await begin()

    async with asyncio.timeout(1):
        assert await settling.wait(told=False)


async def test_a_card_that_does_not_fall_is_left_early(
    local: LocalEngine,
    nvml: FakeNvml,
    begin: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settle, "_PATIENCE_SECONDS", 0.2)
    holds(nvml, local.worker, None)
    settling = await begin()

    async with asyncio.timeout(10):
        assert await settling.wait(told=True)


@pytest.mark.parametrize("case", ["off", "no driver", "remote", "lost"])
async def test_what_cannot_be_measured_is_not_waited_for(
    local: LocalEngine,
    nvml: FakeNvml,
    begin: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    holds(nvml, local.worker, 6 * GIB)
    options: dict[str, object] = {}
    if case == "off":
        options["timeout"] = 0.0
    elif case == "no driver":
        nvml.failing.add("nvmlInit")
    elif case == "remote":
        options["url"] = f"http://192.0.2.1:{local.port}"
    settling = await begin(**options)
    if case == "lost":
        nvml.failing |= {"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"}

    async with asyncio.timeout(2):
        assert await settling.wait(told=True)
    assert observed(begin.metrics) == 0


async def test_a_wait_that_is_cancelled_lets_the_driver_go(
    local: LocalEngine, nvml: FakeNvml, begin: Callable[..., object]
) -> None:
    holds(nvml, local.worker, 6 * GIB)
    settling = await begin()
    waiting = asyncio.ensure_future(settling.wait(told=True))
    await still_waits(waiting, nvml)

    waiting.cancel()
    settling.close()

    await asyncio.to_thread(wait_until, lambda: nvml.started == 0)


def test_a_fall_is_over_under_its_floor() -> None:
    fall = Fall(1000 * MIB, floor=50 * MIB, enough=500 * MIB, patience=5)

    assert not fall.is_over(0.0, 51 * MIB)
    assert fall.is_over(0.0, 50 * MIB)


def test_a_fall_in_steps_is_over_when_it_rests() -> None:
    fall = Fall(1000 * MIB, floor=0, enough=500 * MIB, patience=5)

    steps = [(0.0, 900), (0.5, 900), (1.0, 400), (1.2, 300), (1.4, 300), (1.6, 300)]
    assert [fall.is_over(at, used * MIB) for at, used in steps] == [False] * 5 + [True]


def test_a_fall_that_does_not_begin_is_over_when_patience_ends() -> None:
    fall = Fall(1000 * MIB, floor=0, enough=500 * MIB, patience=2)

    assert not fall.is_over(1.9, 990 * MIB)
    assert fall.is_over(2.0, 990 * MIB)
    assert not fall.has_fallen(990 * MIB)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])  # noqa: S104 - the tests' own
def test_who_listens_is_found_with_its_descendants(host: str) -> None:
    if ":" in host and not local_addresses("::1"):
        pytest.skip("no IPv6 on this machine")
    asked = "::1" if host == "::1" else "127.0.0.1"
    engine = LocalEngine(host)
    try:
        roots = listening_pids(local_addresses(asked), engine.port)

        assert roots == {engine.pid}
        assert is_descendant(engine.pid, roots) is True
        assert is_descendant(engine.worker, roots) is True
        assert is_descendant(os.getpid(), roots) is False
        assert is_descendant(2**22 + 5, roots) is None
    finally:
        engine.end()


def test_a_port_of_another_address_is_not_ours(local: LocalEngine) -> None:
    assert listening_pids([ipaddress.ip_address("127.0.0.2")], local.port) == frozenset()


def test_only_a_listener_counts_and_not_who_holds_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "0100007F:2CAA"
    lines = ["sl local rem st", f"0: {place} 0: 01 0 0 0 0 0 5", f"1: {place} 0: 0A 0 0 0 0 0 6"]
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text("\n".join(lines))
    for pid, inode in ((50, 5), (60, 6)):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
    monkeypatch.setattr(engine_processes, "_PROC", tmp_path)

    assert listening_pids(local_addresses("127.0.0.1"), 0x2CAA) == {60}


def test_a_process_with_any_name_has_a_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, stat in ((50, "50 (a) R 9 (b)) S 40 1 1"), (40, "40 (x) S 1 1 1"), (1, "1 (i) S 0 0")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(stat)
    monkeypatch.setattr(engine_processes, "_PROC", tmp_path)

    assert is_descendant(50, frozenset((40,))) is True
    assert is_descendant(50, frozenset((9,))) is False


@pytest.mark.parametrize(
    ("host", "count"), [("127.0.0.1", 1), ("192.0.2.1", 0), ("no.such.invalid", 0), ("", 0)]
)
def test_only_addresses_of_this_machine_are_local(host: str, count: int) -> None:
    assert len(local_addresses(host)) == count
