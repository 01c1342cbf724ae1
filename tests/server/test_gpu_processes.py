"""What serve shows of the card's memory, through the real nvidia-ml-py and a stub of the driver."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ocgpu.server import engine_processes, gpu_processes
from ocgpu.server.gpu_processes import GpuProcesses
from tests.fakes.nvml import FakeNvml, Process, three_gpus
from tests.fakes.nvml_stub import ERRORS, GIB, UUIDS, Driver
from tests.namespaces import in_namespaces
from tests.processes import Processes
from tests.server.client import call
from tests.server.occupants import EngineProcesses, Occupants, outside
from tests.server.served import Served
from tests.waiting import wait_until

MIB = 1 << 20
HOSTILE = "x\x1b[2J\ny"
LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")


@pytest.fixture
def around(processes: Processes, tmp_path: Path) -> EngineProcesses:
    return EngineProcesses(processes, tmp_path)


@pytest.fixture
def occupants(processes: Processes, driver: Driver, tmp_path: Path) -> Occupants:
    return Occupants(processes, driver, tmp_path)


def memory_of_engines(served: Served) -> dict[str, int | None]:
    return {name: one["memory_bytes"] for name, one in served.health()["upstreams"].items()}


def memory_of_peers(served: Served) -> dict[str, int | None]:
    document = call("GET", f"{served.admin}/gpu/peers").json()
    return {one["name"]: one["memory_bytes"] for one in (document["self"], *document["peers"])}


def told(served: Served, message: str) -> list[dict[str, Any]]:
    return [line for line in served.lines() if line["message"].startswith(message)]


def looks(driver: Driver) -> int:
    return driver.calls("nvmlDeviceGetCount_v2")


def see_two_looks(driver: Driver, served: Served) -> None:
    """Wait for a whole look at what the driver says now; asking makes serve look."""
    before = looks(driver)
    wait_until(lambda: served.health() and looks(driver) >= before + 2, what="two more looks")


def test_an_engine_has_its_memory_and_that_of_its_children(
    around: EngineProcesses, occupants: Occupants, driver: Driver
) -> None:
    driver.holds((around.runner, 6 * GIB), (around.comfy, GIB))
    driver.holds((around.runner, 2 * GIB), card=1)
    served = occupants.serve(around)

    wait_until(lambda: memory_of_engines(served) == {"ollama": 8 * GIB, "comfyui": GIB})

    assert served.metrics()['gpulock_engine_memory_bytes{engine="ollama"}'] == 8 * GIB
    driver.holds((around.comfy, 3 * GIB))
    driver.holds(card=1)
    wait_until(lambda: memory_of_engines(served) == {"ollama": 0, "comfyui": 3 * GIB})


def test_a_peer_has_its_memory_and_that_of_its_children(
    around: EngineProcesses, occupants: Occupants, driver: Driver
) -> None:
    (chat, chat_child), (idle, _), (secret, _) = (
        occupants.peer(name) for name in ("chat", "idle", "secret")
    )
    driver.holds((chat, GIB), (chat_child, 2 * GIB), (secret, None))
    served = occupants.serve(around)

    wanted = {"ocgpu-serve": 0, "chat": 3 * GIB, "idle": 0, "secret": None}
    wait_until(lambda: memory_of_peers(served) == wanted)

    metrics = served.metrics()
    assert metrics[f'gpushare_peer_memory_bytes{{pid="{chat}",name="chat"}}'] == 3 * GIB
    assert metrics[f'gpushare_peer_memory_bytes{{pid="{idle}",name="idle"}}'] == 0
    assert not any("secret" in series and "memory" in series for series in metrics)
    props = call("GET", f"{served.ollama}/props").json()["opencoti"]["gpu_share"]["peers"]
    assert {one["name"]: one["memory_bytes"] for one in props}["chat"] == 3 * GIB


def test_a_process_that_takes_part_in_nothing_is_reported_once(
    around: EngineProcesses, occupants: Occupants, driver: Driver
) -> None:
    served = occupants.serve(around)
    wait_until(lambda: outside(served) == [])
    pid = occupants.stranger(HOSTILE)

    driver.holds((pid, 5 * GIB))
    wanted = [{"pid": pid, "name": "x\\x1b[2J\\ny", "memory_bytes": 5 * GIB}]
    wait_until(lambda: outside(served) == wanted)

    metrics = served.metrics()
    assert metrics["gpulock_outside_processes"] == 1
    assert metrics["gpulock_outside_memory_bytes"] == 5 * GIB
    see_two_looks(driver, served)
    (appeared,) = told(served, "a process that takes part in nothing is on the gpu")
    assert (appeared["pid"], appeared["memory_mib"], appeared["level"]) == (pid, 5120, "warning")
    assert appeared["program"] == wanted[0]["name"]
    driver.holds()
    wait_until(lambda: outside(served) == [])
    assert served.metrics()["gpulock_outside_processes"] == 0
    see_two_looks(driver, served)
    assert [line["pid"] for line in told(served, "the process outside is gone")] == [pid]


def test_nobody_who_takes_part_is_an_outsider(
    around: EngineProcesses, occupants: Occupants, driver: Driver
) -> None:
    stranger, drawing = occupants.stranger(), occupants.stranger()
    peer, child = occupants.peer("peer")
    holder, _ = occupants.program(
        "import ocgpu, time\nwith ocgpu.Lease(mode='shared'): print('held', flush=True); "
        "time.sleep(1000)"
    )
    served = occupants.serve(around)
    inside = (around.runner, around.comfy, peer, child, holder, served.process.pid)
    driver.holds(*((pid, GIB) for pid in (*inside, stranger)), (2**22 + 5, GIB))
    driver.holds((drawing, GIB), how="graphics")

    wait_until(lambda: outside(served))

    assert [one["pid"] for one in outside(served) or ()] == [stranger]


def test_a_peer_in_a_container_is_no_outsider_and_init_is_nobody_s_parent(
    around: EngineProcesses,
    occupants: Occupants,
    driver: Driver,
    processes: Processes,
    tmp_path: Path,
) -> None:
    log = tmp_path / "contained.log"
    program = "import ocgpu, time; pacer = ocgpu.Pacer(name='contained'); time.sleep(1000)"
    command = [*in_namespaces("--pid"), sys.executable, "-c", program]
    outer = processes.start(command, log=log)
    served = occupants.serve(around)
    wait_until(lambda: memory_of_peers(served) == {"ocgpu-serve": 0, "contained": 0})
    (contained,) = psutil.Process(outer.pid).children()
    stranger = occupants.stranger()

    driver.holds((contained.pid, GIB), (stranger, GIB))

    wait_until(lambda: outside(served))
    assert [one["pid"] for one in outside(served) or ()] == [stranger]
    assert memory_of_peers(served) == {"ocgpu-serve": None, "contained": None}


def test_an_outsider_that_becomes_a_peer_is_none_any_more(
    around: EngineProcesses, occupants: Occupants, driver: Driver
) -> None:
    pid, _ = occupants.program(
        "import os, signal, sys, time, ocgpu\n"
        "signal.signal(signal.SIGUSR1, lambda *_: globals().update(pacer=ocgpu.Pacer()))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.05)"
    )
    driver.holds((pid, GIB))
    served = occupants.serve(around)
    wait_until(lambda: outside(served))

    os.kill(pid, signal.SIGUSR1)

    wait_until(lambda: outside(served) == [])
    assert [line["pid"] for line in told(served, "the process outside takes part now")] == [pid]


def test_the_largest_are_shown_and_all_are_counted(
    around: EngineProcesses, occupants: Occupants, driver: Driver, processes: Processes
) -> None:
    sleeps = [processes.start(("sleep", "1000"), log=Path(os.devnull)).pid for _ in range(18)]
    driver.holds(*((pid, size * MIB) for size, pid in enumerate(sleeps, 1)))
    served = occupants.serve(around)

    shown = wait_until(lambda: outside(served))

    assert [one["memory_bytes"] // MIB for one in shown] == list(range(18, 2, -1))
    assert served.metrics()["gpulock_outside_processes"] == 18
    assert served.metrics()["gpulock_outside_memory_bytes"] == sum(range(1, 19)) * MIB


def test_an_outsider_of_unknown_size_is_not_said_to_hold_nothing(
    around: EngineProcesses, occupants: Occupants, driver: Driver
) -> None:
    driver.holds((occupants.stranger(), None))
    served = occupants.serve(around)

    shown = wait_until(lambda: outside(served))

    assert [one["memory_bytes"] for one in shown] == [None]
    metrics = served.metrics()
    assert metrics["gpulock_outside_processes"] == 1
    assert "gpulock_outside_memory_bytes" not in metrics


def test_only_the_card_with_the_key_counts(
    around: EngineProcesses, occupants: Occupants, driver: Driver
) -> None:
    here, elsewhere = occupants.stranger(), occupants.stranger()
    driver.holds((elsewhere, 2 * GIB), (around.runner, GIB), card=0)
    driver.holds((here, 3 * GIB), (around.runner, 4 * GIB), card=1)
    served = occupants.serve(around, OCGPU_GPU_KEY=UUIDS[1])

    wait_until(lambda: outside(served))

    assert [one["pid"] for one in outside(served) or ()] == [here]
    assert memory_of_engines(served)["ollama"] == 4 * GIB
    # Its own card lost, it does not look at the others.
    driver.fail("nvmlDeviceGetUUID:1", ERRORS["GPU_IS_LOST"])
    wait_until(lambda: outside(served) is None)


def test_without_nvml_nothing_is_known_and_nothing_is_said(
    around: EngineProcesses, occupants: Occupants, driver: Driver
) -> None:
    driver.holds((around.runner, GIB))
    served = occupants.serve(around, LD_LIBRARY_PATH="")

    for _ in range(3):
        assert memory_of_engines(served) == {"ollama": None, "comfyui": None}
        assert memory_of_peers(served) == {"ocgpu-serve": None}
        assert outside(served) is None
        names = list(served.metrics())
        assert not any("memory_bytes" in name or "outside_processes" in name for name in names)

    assert looks(driver) == 0
    assert [line for line in served.lines() if line["level"] in {"warning", "error"}] == []


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("functions", [LISTS, (*LISTS, "nvmlDeviceGetMemoryInfo")])
def test_what_a_driver_refuses_to_tell_is_unknown_until_it_tells_again(
    around: EngineProcesses,
    occupants: Occupants,
    driver: Driver,
    functions: tuple[str, ...],
    error: str,
) -> None:
    stranger = occupants.stranger()
    driver.holds((around.runner, GIB), (stranger, GIB))
    served = occupants.serve(around)
    wait_until(lambda: memory_of_engines(served)["ollama"] == GIB)

    starts = driver.calls("nvmlInitWithFlags")
    for function in functions:
        driver.fail(function, ERRORS[error])
    wait_until(lambda: memory_of_engines(served) == {"ollama": None, "comfyui": None})
    assert memory_of_peers(served) == {"ocgpu-serve": None}
    assert outside(served) is None

    for function in functions:
        driver.fail(function, 0)
    wait_until(lambda: memory_of_engines(served) == {"ollama": GIB, "comfyui": 0})
    assert [one["pid"] for one in outside(served) or ()] == [stranger]
    # A driver that answers nothing at all may be another one by now.
    assert (driver.calls("nvmlInitWithFlags") > starts) is (len(functions) > len(LISTS))
    # Neither its absence nor its return is told: nobody saw it go.
    said = [line["pid"] for line in served.lines() if "program" in line]
    assert said == [stranger]


def test_an_outsider_on_a_card_that_is_lost_is_not_said_to_be_gone(
    around: EngineProcesses, occupants: Occupants, driver: Driver
) -> None:
    stays, lost = occupants.stranger(), occupants.stranger()
    driver.holds((stays, GIB))
    driver.holds((lost, 2 * GIB), card=1)
    served = occupants.serve(around)
    wait_until(lambda: len(outside(served) or ()) == 2)

    driver.fail(f"{LISTS[0]}:1", ERRORS["GPU_IS_LOST"])
    wait_until(lambda: [one["pid"] for one in outside(served) or ()] == [stays])
    driver.fail(f"{LISTS[0]}:1", 0)
    wait_until(lambda: len(outside(served) or ()) == 2)

    said = [line["pid"] for line in served.lines() if "program" in line]
    assert sorted(said) == sorted((stays, lost))


def test_a_driver_that_hangs_holds_up_neither_an_answer_nor_the_end(
    around: EngineProcesses, occupants: Occupants, driver: Driver
) -> None:
    driver.slow("nvmlDeviceGetMemoryInfo", 100_000)
    served = occupants.serve(around)
    wait_until(lambda: driver.calls("nvmlDeviceGetMemoryInfo"), what="the driver to hang")

    began = time.monotonic()
    assert memory_of_engines(served) == {"ollama": None, "comfyui": None}
    assert memory_of_peers(served) == {"ocgpu-serve": None}
    assert outside(served) is None
    assert served.metrics()["gpulock_llm_inflight"] == 0
    assert time.monotonic() - began < 5
    assert served.stop() == 0


def test_the_driver_is_asked_once_a_second_at_most(
    around: EngineProcesses, occupants: Occupants, driver: Driver
) -> None:
    served = occupants.serve(around)
    wait_until(lambda: outside(served) == [])
    before, began = looks(driver), time.monotonic()

    while time.monotonic() - began < 3:
        served.metrics()
        memory_of_peers(served)

    # A look that was begun, and one a second.
    assert 2 <= looks(driver) - before <= time.monotonic() - began + 1


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = three_gpus()
    for card in fake.cards:
        card.free = card.total
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def stranger(nvml: FakeNvml) -> Iterator[int]:
    """The one process on the card, and no child of this one: its parent has ended."""
    parent = "sleep 1000 >/dev/null 2>&1 & echo $!"
    said = subprocess.run(["sh", "-c", parent], capture_output=True, check=True, timeout=10)
    pid = int(said.stdout)
    nvml.cards[0].computing = [Process(pid, GIB)]
    yield pid
    os.kill(pid, signal.SIGKILL)


async def outsiders(engine_url: str, gpu_key: str) -> list[int]:
    """Look from this process, without peers, before one engine."""
    watch = GpuProcesses({"engine": engine_url}, gpu_key, list)
    watch.start()
    try:
        await asyncio.to_thread(wait_until, lambda: watch.outside() is not None)
    finally:
        await watch.close()
    return [one["pid"] for one in watch.outside() or ()]


async def test_what_the_user_of_an_engine_runs_may_be_the_engine_where_nobody_is_seen(
    stranger: int, gpu_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        # As for a user who may not look into the processes of others.
        monkeypatch.setattr(engine_processes, "_link", lambda *_: None)

        assert await outsiders(url, gpu_key) == []
    assert await outsiders(url, gpu_key) == [stranger]


async def test_who_holds_a_lease_under_no_name_may_be_anybody(
    stranger: int, gpu_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_key: str) -> None:
        raise OSError

    assert await outsiders("http://127.0.0.1:1", gpu_key) == [stranger]
    monkeypatch.setattr(gpu_processes, "lease_status", unreadable)

    assert await outsiders("http://127.0.0.1:1", gpu_key) == []
