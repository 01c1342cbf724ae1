"""What the driver tells of memory, with a stand-in for `pynvml` and with one for the driver."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ocgpu.gpu_memory import GpuMemory
from tests.fakes.nvml import GIB, Card, FakeNvml, Process, three_gpus
from tests.fakes.nvml_stub import ERRORS, UUIDS, Driver, compile_stub


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = three_gpus()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_memory_in_use_is_told_by_process_over_all_cards(nvml: FakeNvml) -> None:
    first, second, _ = nvml.cards
    first.computing = [Process(7, 3 * GIB), Process(8, GIB), Process(9, None)]
    # One that also draws is listed twice, with the same memory.
    first.drawing = [Process(7, 3 * GIB), Process(10, GIB)]
    second.computing = [Process(7, 2 * GIB), Process(9, GIB)]
    memory = GpuMemory.open()
    assert memory is not None

    reading = memory.read()

    assert reading.by_pid == {7: 5 * GIB, 8: GIB, 9: None, 10: GIB}
    assert reading.total == (139 - 100 + 15 - 1) * GIB
    assert reading.computing == {7, 8, 9}
    memory.close()
    assert nvml.started == 0


def test_a_card_that_is_lost_hides_its_own_memory_alone(nvml: FakeNvml) -> None:
    nvml.failing = {
        f"{question}:{UUIDS[0]}"
        for question in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses")
    }
    nvml.cards[0].computing = [Process(7, GIB)]
    nvml.cards[1].computing = [Process(8, GIB)]
    memory = GpuMemory.open()
    assert memory is not None

    assert memory.read() == ({8: GIB}, 14 * GIB, frozenset((8,)), "GPU is lost")
    memory.close()


@pytest.mark.usefixtures("no_nvml")
def test_without_nvml_no_memory_is_seen() -> None:
    assert GpuMemory.open() is None


def test_with_nvml_that_does_not_start_no_memory_is_seen(nvml: FakeNvml) -> None:
    nvml.failing = {"nvmlInit"}

    assert GpuMemory.open() is None


def test_without_any_card_that_answers_the_memory_is_unknown(nvml: FakeNvml) -> None:
    nvml.failing = {"nvmlDeviceGetCount"}
    memory = GpuMemory.open()
    assert memory is not None

    assert memory.read() == ({}, None, frozenset(), "GPU is lost")
    memory.close()


READ = (
    "from ocgpu.gpu_memory import GpuMemory; memory = GpuMemory.open({key!r}); "
    "print(tuple(memory.read())); memory.close()"
)


def read_by_stub(driver: Driver, key: str | None = None) -> tuple[Any, ...]:
    """What a process sees that loads the stub through the real nvidia-ml-py."""
    done = subprocess.run(
        [sys.executable, "-c", READ.format(key=key)],
        env={**os.environ, **driver.environ},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    seen: tuple[Any, ...] = eval(done.stdout)  # noqa: S307 - a tuple of this test's own program
    return seen


def test_the_real_bindings_tell_what_the_driver_says(driver: Driver) -> None:
    driver.holds((7, 3 * GIB), (9, None))
    driver.holds((7, 3 * GIB), (10, GIB), how="graphics")
    driver.holds((7, 2 * GIB), card=1)
    driver.set(used_0=8 * GIB, used_1=2 * GIB)

    by_pid = {7: 5 * GIB, 9: None, 10: GIB}
    assert read_by_stub(driver) == (by_pid, 10 * GIB, frozenset((7, 9)), None)
    assert read_by_stub(driver, UUIDS[1]) == ({7: 2 * GIB}, 2 * GIB, frozenset((7,)), None)
    assert read_by_stub(driver, "any-name") == read_by_stub(driver)


def test_a_driver_older_than_the_bindings_tells_it_too(driver: Driver, tmp_path: Path) -> None:
    old = Driver(compile_stub(tmp_path, "-DWITHOUT_V3"), tmp_path / "old.txt")
    old.holds((7, 3 * GIB))
    old.holds((8, GIB), how="graphics")

    assert read_by_stub(old) == ({7: 3 * GIB, 8: GIB}, 0, frozenset((7,)), None)
    assert old.calls("nvmlDeviceGetComputeRunningProcesses_v2") > 0


@pytest.mark.parametrize("code", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetHandleByIndex_v2:0",
        "nvmlDeviceGetComputeRunningProcesses_v3:0",
        "nvmlDeviceGetGraphicsRunningProcesses_v3:0",
        "nvmlDeviceGetCount_v2",
    ],
)
def test_what_fails_leaves_a_gap_in_the_words_of_the_driver(
    driver: Driver, function: str, code: int
) -> None:
    driver.fail(function, code)

    gap = read_by_stub(driver)[-1]

    words = {3: "Not Supported", 4: "Insufficient Permissions", 15: "GPU is lost"}
    assert gap == words.get(code, "Driver Not Loaded")


def test_a_card_in_use_without_a_process_leaves_a_gap(driver: Driver) -> None:
    driver.set(used_0=GIB)

    assert read_by_stub(driver)[-1] == "the driver lists no process on a card that is in use"
    driver.holds((7, GIB))
    assert read_by_stub(driver)[-1] is None


def test_a_card_that_the_driver_does_not_find_gives_nothing_of_the_others(driver: Driver) -> None:
    driver.holds((7, GIB))
    driver.fail("nvmlDeviceGetUUID:1", ERRORS["GPU_IS_LOST"])

    assert read_by_stub(driver, UUIDS[1]) == ({}, None, frozenset(), "GPU is lost")


def test_an_instance_of_a_card_is_looked_at_alone(nvml: FakeNvml) -> None:
    first, second = (Card(f"MIG-{n}/1/0", "H200 MIG", 18 * GIB, 17 * GIB) for n in "12")
    second.computing = [Process(7, GIB)]
    nvml.cards[1].instances = [first, second]
    nvml.cards[0].computing = [Process(8, GIB)]
    memory = GpuMemory.open("MIG-2_1_0")
    assert memory is not None

    assert memory.read() == ({7: GIB}, GIB, frozenset((7,)), None)
    memory.close()
