"""`ocgpu doctor` on the GPU: its key, its driver, the variables of CUDA."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ocgpu.doctor import gpu
from ocgpu.doctor.finding import Finding
from ocgpu.doctor.gpu import Device, Driver
from ocgpu.errors import ConfigError
from tests.fakes.nvml import FakeNvml, NvmlError, three_gpus

H200, H200_2, T4 = three_gpus().cards
# A driver's library whose start fails with the number of nvmlReturn_t that stands in `CODE`.
STUB = """
int nvmlInit_v2(void) { return CODE; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return CODE; }
const char *nvmlErrorString(int code) { return code == 18 ? "version mismatch" : "refused"; }
"""
LOOK = """
from ocgpu.doctor import gpu
finding, = gpu.check_driver(gpu.look_at_driver(), "PCI device 0000:01:00.0")
print(finding.status, finding.found, finding.remedy, sep="|")
"""


class Nvml(FakeNvml):
    """The fake with the driver's version and the numbers of its errors."""

    code: int | None = None

    def nvmlInit(self) -> None:  # noqa: N802
        if self.code is not None:
            problem = NvmlError("it will not")
            problem.value = self.code  # type: ignore[attr-defined]
            raise problem
        super().nvmlInit()

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        self._answer("nvmlSystemGetDriverVersion")
        return "570.1"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCGPU_GPU_KEY", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml(three_gpus().cards)
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


def key_of(wanted: str | int | None = None, configured: str = "") -> tuple[str | None, Finding]:
    key, (finding,) = gpu.check_key(wanted, configured, os.environ, gpu.look_at_driver().devices)
    return key, finding


def pci(sysfs: Path, vendor: str, kind: str = "0x030000") -> None:
    folder = sysfs / "0000:01:00.0"
    folder.mkdir()
    for name, text in (("class", kind), ("vendor", vendor), ("device", "0x2204")):
        (folder / name).write_text(f"{text}\n")


def test_the_key_of_the_driver_is_named_with_its_card(nvml: Nvml) -> None:
    key, finding = key_of()

    assert key == H200.uuid
    assert finding.status == "ok"
    assert finding.found == f"{H200.uuid} (NVIDIA H200), from the driver"
    assert nvml.started == 0


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize("name", [H200.uuid, T4.uuid])
def test_a_key_in_the_environment_that_is_a_gpu_of_this_machine_is_well(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("OCGPU_GPU_KEY", name)

    assert key_of() == (
        name,
        Finding("gpu key", "ok", f"{name}, from OCGPU_GPU_KEY, is a GPU of this machine"),
    )


@pytest.mark.usefixtures("nvml")
def test_a_name_in_the_environment_beside_a_real_gpu_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OCGPU_GPU_KEY", "card")

    key, finding = key_of()

    assert (key, finding.status) == ("card", "warning")
    assert H200.uuid in finding.found
    assert "to all programs" in str(finding.remedy)


def test_a_name_that_only_the_settings_file_has_is_a_warning(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert key_of(configured="card")[1].status == "warning"
    assert key_of(configured=str(H200.uuid))[1].status == "ok"
    nvml.cards = []
    assert key_of(configured="card")[1].status == "warning"

    monkeypatch.setenv("OCGPU_GPU_KEY", "card")
    assert key_of(configured="card")[1].status == "ok"


@pytest.mark.usefixtures("nvml")
def test_a_flag_says_which_gpu_is_looked_at() -> None:
    assert key_of("any-name")[0] == "any-name"
    assert key_of("any-name")[1].status == "ok"
    assert key_of(2)[0] == T4.uuid
    with pytest.raises(ConfigError):
        key_of("a/b")


@pytest.mark.usefixtures("nvml")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    key, finding = key_of(7)

    assert (key, finding.status) == (None, "error")
    assert finding.found == "no GPU 7: this process sees 3"
    assert "a lower number" in str(finding.remedy)


@pytest.mark.usefixtures("nvml")
def test_a_number_beside_a_name_in_the_environment_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OCGPU_GPU_KEY", "card")

    assert key_of(1) == (
        H200_2.uuid,
        Finding("gpu key", "ok", f"{H200_2.uuid} (NVIDIA H200), from the driver"),
    )


def test_a_gpu_that_was_asked_for_on_a_machine_without_one_is_an_error(nvml: Nvml) -> None:
    nvml.cards = []

    assert key_of(0)[1].status == "error"


def test_a_card_without_a_name_is_of_an_unknown_model(nvml: Nvml) -> None:
    nvml.failing = {f"nvmlDeviceGetName:{H200.uuid}"}

    assert key_of()[1].found == f"{H200.uuid} (unknown model), from the driver"


@pytest.mark.usefixtures("nvml")
def test_a_gpu_that_is_hidden_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert key_of()[1].status == "error"


def test_a_gpu_that_does_not_answer_is_an_error(nvml: Nvml) -> None:
    nvml.failing = {f"nvmlDeviceGetUUID:{H200.uuid}"}

    key, finding = key_of()

    assert (key, finding.status) == (None, "error")
    assert finding.found.startswith("no answer from GPU 0")
    assert gpu.check_key(None, "", os.environ, ())[1][0].status == "error"


def test_no_gpu_at_all_is_a_warning(nvml: Nvml) -> None:
    nvml.cards = []

    key, finding = key_of()

    assert (key, finding.status) == (None, "warning")
    assert "OCGPU_GPU_KEY" in str(finding.remedy)


def test_a_working_driver_is_named_by_its_version(nvml: Nvml) -> None:
    driver = gpu.look_at_driver()

    assert driver.devices == tuple(Device(card.uuid, card.name) for card in nvml.cards)
    for nvidia in (None, "/dev/nvidiactl"):
        assert gpu.check_driver(driver, nvidia) == [
            Finding("driver", "ok", "NVIDIA 570.1, 3 GPU(s)")
        ]
    assert nvml.started == 0


def test_a_driver_that_lists_no_card_though_there_is_one_is_a_warning(nvml: Nvml) -> None:
    nvml.cards = []
    driver = gpu.look_at_driver()

    assert gpu.check_driver(driver, None)[0].status == "ok"
    (finding,) = gpu.check_driver(driver, "/dev/nvidiactl")
    assert (finding.status, "`--gpus all`" in str(finding.remedy)) == ("warning", True)


def test_a_driver_that_does_not_count_its_cards_lists_none(nvml: Nvml) -> None:
    nvml.failing = {"nvmlDeviceGetCount"}

    assert gpu.look_at_driver() == Driver("works", version="570.1")


def test_a_driver_that_lost_a_card_is_an_error(nvml: Nvml) -> None:
    nvml.failing = {
        f"nvmlDeviceGetHandleByIndex:{H200.uuid}",
        f"nvmlDeviceGetName:{T4.uuid}",
        "nvmlSystemGetDriverVersion",
    }

    driver = gpu.look_at_driver()
    (finding,) = gpu.check_driver(driver, None)

    assert driver.devices == (
        Device(None, None),
        Device(H200_2.uuid, "NVIDIA H200"),
        Device(T4.uuid, None),
    )
    assert (finding.status, finding.found) == (
        "error",
        "NVIDIA of unknown version, 3 GPU(s), 1 without an answer",
    )


@pytest.mark.parametrize(
    ("code", "nvidia", "status", "words"),
    [
        (12, None, "ok", "no NVML is needed"),
        (12, "/dev/nvidiactl", "warning", "NVML is missing"),
        (9, None, "ok", "no NVML is needed"),
        (9, "/dev/nvidiactl", "error", "modprobe nvidia"),
        (18, None, "error", "reboot"),
        (4, "/dev/nvidiactl", "error", "/dev/nvidia*"),
        (999, None, "error", "it will not"),
    ],
)
def test_a_driver_that_does_not_start_is_told_by_its_reason(
    nvml: Nvml, code: int, nvidia: str | None, status: str, words: str
) -> None:
    nvml.code = code

    (finding,) = gpu.check_driver(gpu.look_at_driver(), nvidia)

    assert finding.status == status
    assert words in f"{finding.found}; {finding.remedy}"


@pytest.mark.parametrize(
    ("code", "status", "words"), [(18, "error", "reboot"), (4, "error", "Insufficient")]
)
def test_the_real_library_says_why_the_driver_refuses(
    tmp_path: Path, code: int, status: str, words: str
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: `cc` is not installed")
    source = tmp_path / "stub.c"
    source.write_text(STUB.replace("CODE", str(code)))
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True, timeout=60)

    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )

    assert done.stdout.startswith(f"{status}|")
    assert words in done.stdout


def test_without_the_python_package_a_gpu_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]  # import fails
    driver = gpu.look_at_driver()

    assert driver == Driver("no module")
    assert gpu.check_driver(driver, None)[0].status == "ok"
    assert gpu.check_driver(driver, "PCI device 1")[0].status == "warning"
    assert gpu.check_driver(driver, "PCI device 1")[0].remedy == "`pip install nvidia-ml-py`"


def test_a_card_is_seen_without_the_library(tmp_path: Path) -> None:
    sysfs, control = tmp_path / "sysfs", tmp_path / "nvidiactl"
    assert gpu.nvidia_device(sysfs, control) is None
    sysfs.mkdir()
    pci(sysfs, "0x10de")
    assert gpu.nvidia_device(sysfs, control) == "PCI device 0000:01:00.0"
    control.touch()
    assert gpu.nvidia_device(sysfs, control) == str(control)


@pytest.mark.parametrize(("vendor", "kind"), [("0x1002", "0x030000"), ("0x10de", "0x040300")])
def test_other_devices_are_no_card_of_nvidia(tmp_path: Path, vendor: str, kind: str) -> None:
    pci(tmp_path, vendor, kind)

    assert gpu.nvidia_device(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("vendor", "status", "words"),
    [("0x10de", "warning", "call it by its UUID"), ("0x1002", "ok", "from the PCI bus")],
)
def test_a_key_from_the_bus_is_a_warning_where_others_may_have_nvml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, status: str, words: str
) -> None:
    pci(tmp_path, vendor)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    for name in ("gpu_key", "gpus"):
        function = getattr(gpu, name)
        monkeypatch.setattr(gpu, name, lambda *a, f=function: f(*a, sysfs=tmp_path))

    key, finding = key_of()

    assert str(key).startswith("pci-")
    assert finding.status == status
    assert words in finding.found


SAME = (Device("GPU-aa", "H200"), Device("GPU-bb", "H200"))
MIXED = (Device("GPU-aa", "H200"), Device("GPU-bb", "T4"))


@pytest.mark.parametrize(
    ("order", "devices", "status", "words"),
    [
        (None, (), "ok", "is unset"),
        ("3", (), "ok", "is `3`"),
        (None, SAME, "ok", "2 GPU(s) visible"),
        ("1", SAME, "ok", "1 GPU(s) visible"),
        ("GPU-bb", MIXED, "ok", "1 GPU(s) visible"),
        (None, MIXED, "warning", "the GPUs differ"),
        ("1", MIXED, "warning", "the GPUs differ"),
        ("0,5,1", SAME, "warning", "`5` ends the list"),
        ("", SAME, "error", "hides all 2"),
        ("-1", SAME, "error", "hides all 2"),
        ("GPU-cc", SAME, "error", "hides all 2"),
    ],
)
def test_what_cuda_hides_or_orders_otherwise_is_said(
    order: str | None, devices: tuple[Device, ...], status: str, words: str
) -> None:
    environ = {} if order is None else {"CUDA_VISIBLE_DEVICES": order}

    (finding,) = gpu.check_cuda(environ, devices)

    assert finding.status == status
    assert words in finding.found
    assert (finding.remedy is None) == (status == "ok")


def test_the_order_of_the_bus_makes_numbers_safe() -> None:
    assert gpu.check_cuda({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, MIXED)[0].status == "ok"
    assert gpu.check_cuda({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, MIXED)[0].status == "warning"
