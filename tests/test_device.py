import sys
from pathlib import Path

import pytest

from ocgpu.device import Gpu, GpuMemory, gpu_argument, gpu_key, gpus, resolve_key, visible
from ocgpu.errors import ConfigError, NoGpuError
from tests.fakes.nvml import GIB, Card, FakeNvml, Process, three_gpus

UUIDS = ["GPU-aaaa1111-0000", "GPU-aaaa2222-0000", "GPU-bbbb3333-0000"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCGPU_GPU_KEY", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = three_gpus()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]  # import fails


def pci(sysfs: Path, address: str, device_class: str, vendor: str, device: str = "0x2204") -> None:
    folder = sysfs / address
    folder.mkdir(parents=True)
    for name, text in (("class", device_class), ("vendor", vendor), ("device", device)):
        (folder / name).write_text(f"{text}\n")


def test_key_is_the_uuid_of_the_driver(nvml: FakeNvml) -> None:
    assert [gpu_key(0), gpu_key(1), gpu_key(2)] == UUIDS
    assert nvml.started == 0


def test_gpus_are_listed_with_name_and_memory(nvml: FakeNvml) -> None:
    assert gpus()[2] == Gpu(
        key="GPU-bbbb3333-0000",
        name="NVIDIA T4",
        index=2,
        memory_total_bytes=15 * GIB,
        memory_free_bytes=GIB,
    )
    assert [gpu.index for gpu in gpus()] == [0, 1, 2]
    assert nvml.started == 0


@pytest.mark.parametrize(
    ("order", "chosen"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("GPU-bbbb", [2]),
        ("GPU-aaaa2222-0000,GPU-b", [1, 2]),
        ("", []),
        ("-1", []),
        ("1,-1,2", [1]),
        ("0,3,1", [0]),
        ("GPU-aaaa", []),  # two cards begin so
        ("GPU-cccc,0", []),
        ("aaaa1111", []),
        ("NoDevFiles", []),
        ("MIG-1,0", ["MIG-1", 0]),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(order: str | None, chosen: object) -> None:
    assert visible(order, UUIDS) == chosen


def test_device_numbers_follow_the_order_that_cuda_shows(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-aaaa1")

    assert [gpu.key for gpu in gpus()] == ["GPU-bbbb3333-0000", "GPU-aaaa1111-0000"]
    assert gpu_key(1) == "GPU-aaaa1111-0000"
    with pytest.raises(NoGpuError, match="no GPU 2: this process sees 2"):
        gpu_key(2)


@pytest.mark.parametrize("order", ["", "-1", "9"])
def test_hidden_gpus_are_no_gpus_and_the_message_says_so(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", order)

    assert gpus() == []
    with pytest.raises(NoGpuError, match=r"`CUDA_VISIBLE_DEVICES` is .*set `OCGPU_GPU_KEY`"):
        gpu_key()


@pytest.mark.parametrize(
    ("function", "attribute"),
    [
        ("nvmlDeviceGetName", "name"),
        ("nvmlDeviceGetMemoryInfo", "memory_total_bytes"),
        ("nvmlDeviceGetMemoryInfo", "memory_free_bytes"),
    ],
)
def test_what_the_driver_does_not_tell_is_none(
    nvml: FakeNvml, function: str, attribute: str
) -> None:
    nvml.failing = {f"{function}:GPU-aaaa2222-0000"}

    assert [getattr(gpu, attribute) is None for gpu in gpus()] == [False, True, False]
    assert [gpu.key for gpu in gpus()] == UUIDS


@pytest.mark.parametrize("function", ["nvmlDeviceGetUUID", "nvmlDeviceGetHandleByIndex"])
def test_a_lost_gpu_does_not_give_its_number_to_the_next_one(nvml: FakeNvml, function: str) -> None:
    nvml.failing = {f"{function}:GPU-aaaa2222-0000"}

    assert [(gpu.index, gpu.key) for gpu in gpus()] == [(0, UUIDS[0]), (2, UUIDS[2])]
    with pytest.raises(NoGpuError, match="no answer from GPU 1: "):
        gpu_key(1)


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_driver_that_does_not_work_leaves_the_word_to_sysfs(
    nvml: FakeNvml, tmp_path: Path, function: str
) -> None:
    nvml.failing = {function}
    pci(tmp_path, "0000:01:00.0", "0x030000", "0x10de")

    assert gpu_key(sysfs=tmp_path).startswith("pci-")
    assert nvml.started == 0


def test_a_driver_that_does_not_stop_is_no_error(nvml: FakeNvml) -> None:
    nvml.failing = {"nvmlShutdown"}

    assert gpu_key() == UUIDS[0]


def test_a_driver_without_cards_leaves_the_word_to_sysfs(nvml: FakeNvml, tmp_path: Path) -> None:
    nvml.cards = []
    pci(tmp_path, "0000:03:00.0", "0x038000", "0x1002")

    assert gpu_key(sysfs=tmp_path).startswith("pci-")


def test_mig_card_is_named_by_its_first_instance_and_others_by_uuid(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.cards[1].instances = [
        Card("MIG-1111-00", "H200 MIG 1g", 18 * GIB, 18 * GIB),
        Card("MIG-2222-00", "H200 MIG 2g", 35 * GIB, 30 * GIB),
    ]
    assert gpu_key(1) == "MIG-1111-00"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2222,0")
    assert gpus()[0] == Gpu("MIG-2222-00", "H200 MIG 2g", 0, 35 * GIB, 30 * GIB)
    assert gpu_key(1) == UUIDS[0]


def test_mig_uuid_that_nvml_does_not_list_is_kept_as_a_legal_key(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-aaaa1111-0000/1/0")

    assert gpu_key() == "MIG-GPU-aaaa1111-0000_1_0"
    assert gpus() == [Gpu("MIG-GPU-aaaa1111-0000_1_0", None, 0, None, None)]


@pytest.mark.usefixtures("no_nvml")
def test_without_nvml_the_key_is_a_hash_of_device_and_address(tmp_path: Path) -> None:
    pci(tmp_path, "0000:00:02.0", "0x030000", "0x8086", "0x9a49")
    pci(tmp_path, "0000:02:00.0", "0x030200", "0x10de")
    pci(tmp_path, "0000:01:00.0", "0x030000", "0x10de")
    pci(tmp_path, "0000:01:00.1", "0x040300", "0x10de", "0x228b")  # its sound device

    found = gpus(sysfs=tmp_path)

    assert [gpu.name for gpu in found] == ["10de:2204", "10de:2204", "8086:9a49"]
    assert len({gpu.key for gpu in found}) == 3
    assert [gpu.key for gpu in found] == [gpu_key(i, sysfs=tmp_path) for i in range(3)]
    # FNV-1a of "10de:2204 0000:01:00.0": processes of other versions must find the same name.
    assert found[0].key == "pci-20a5973b30ea554a"
    assert found[0].memory_total_bytes is None


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize("vendor", ["0x1234", "0x1af4", "0x1013", "0x1a03", "0x102b", "0x15ad", ""])
def test_a_display_adapter_that_cannot_compute_is_no_gpu(tmp_path: Path, vendor: str) -> None:
    pci(tmp_path, "0000:00:01.0", "0x030000", vendor)

    assert gpus(sysfs=tmp_path) == []
    with pytest.raises(NoGpuError, match=r"no GPU found: .*set `OCGPU_GPU_KEY` or pass `gpu=`"):
        gpu_key(sysfs=tmp_path)


@pytest.mark.usefixtures("no_nvml")
def test_unreadable_pci_devices_are_no_gpus(tmp_path: Path) -> None:
    (tmp_path / "0000:01:00.0").mkdir()

    assert gpus(sysfs=tmp_path) == []
    assert gpus(sysfs=tmp_path / "absent") == []


@pytest.mark.usefixtures("no_nvml")
def test_visible_devices_choose_among_pci_devices_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pci(tmp_path, "0000:01:00.0", "0x030000", "0x10de")
    pci(tmp_path, "0000:02:00.0", "0x030000", "0x10de")
    second = gpu_key(1, sysfs=tmp_path)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")

    assert gpu_key(0, sysfs=tmp_path) == second
    assert len(gpus(sysfs=tmp_path)) == 1


@pytest.mark.usefixtures("no_nvml")
def test_an_apple_gpu_is_metal_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    assert gpu_key(sysfs=tmp_path) == "metal-0"
    assert [gpu.key for gpu in gpus(sysfs=tmp_path)] == ["metal-0"]


def test_the_variable_stands_for_device_0_only(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCGPU_GPU_KEY", "pretend")

    assert gpu_key() == "pretend"
    assert resolve_key() == "pretend"
    assert gpu_key(1) == UUIDS[1]


def test_what_the_caller_names_wins(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_key() == UUIDS[0]
    assert resolve_key(2) == UUIDS[2]

    monkeypatch.setenv("OCGPU_GPU_KEY", "pretend")

    assert resolve_key("card.A_1-b") == "card.A_1-b"


@pytest.mark.parametrize("gpu", ["", "a b", "a/b", "../x", "ä", "x" * 65, "a\n", -1, True, 1.0])
def test_an_illegal_gpu_is_refused_with_the_legal_form(gpu: object) -> None:
    with pytest.raises(
        ConfigError, match=r"invalid `gpu`: .*; use .*1 to 64 of `A-Z a-z 0-9 . _ -`"
    ):
        resolve_key(gpu)  # type: ignore[arg-type]


def test_an_illegal_variable_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCGPU_GPU_KEY", "a/b\n")

    with pytest.raises(ConfigError, match=r"invalid `OCGPU_GPU_KEY`: a/b\\n; use 1 to 64"):
        resolve_key()


@pytest.mark.parametrize(
    ("text", "gpu"), [("0", 0), ("12", 12), ("GPU-1", "GPU-1"), ("-1", "-1"), ("٣", "٣"), ("", "")]
)
def test_digits_on_the_command_line_are_the_number_of_a_device(text: str, gpu: str | int) -> None:
    assert gpu_argument(text) == gpu


@pytest.mark.parametrize("device", [-1, True, 0.0, "0", None])
def test_an_illegal_device_number_is_refused(device: object) -> None:
    with pytest.raises(ConfigError, match=r"invalid `device`: .*; use a whole number from 0 on"):
        gpu_key(device)  # type: ignore[arg-type]


def test_memory_in_use_is_told_by_process_over_all_cards(nvml: FakeNvml) -> None:
    first, second, _ = nvml.cards
    first.computing = [Process(7, 3 * GIB), Process(8, GIB), Process(9, None)]
    # One that also draws is listed twice, with the same memory.
    first.drawing = [Process(7, 3 * GIB), Process(10, GIB)]
    second.computing = [Process(7, 2 * GIB), Process(9, GIB)]
    memory = GpuMemory.open()
    assert memory is not None

    by_pid, total = memory.read()

    assert by_pid == {7: 5 * GIB, 8: GIB, 9: None, 10: GIB}
    assert total == (139 - 100 + 15 - 1) * GIB
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

    assert memory.read() == ({8: GIB}, 14 * GIB)
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

    assert memory.read() == ({}, None)
    memory.close()
