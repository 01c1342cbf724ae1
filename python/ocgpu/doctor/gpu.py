"""Which GPU is meant and why, and whether its driver answers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from ocgpu.device import SYSFS_PCI, gpu_key, gpus, resolve_key, visible
from ocgpu.doctor.finding import Finding, error, ok, split_message, warning
from ocgpu.errors import NoGpuError

__all__ = [
    "Device",
    "Driver",
    "check_cuda",
    "check_driver",
    "check_key",
    "look_at_driver",
    "nvidia_device",
]

T = TypeVar("T")

_KEY: Final = "gpu key"
_FILE: Final = "the settings' file"
_DRIVER: Final = "driver"
_CUDA: Final = "cuda variables"
# nvmlReturn_t of nvml.h; the names in `Driver.state`.
_CODES: Final = {4: "denied", 9: "not loaded", 12: "no library", 18: "mismatch"}
_FIXED_ORDER: Final = "PCI_BUS_ID"
_NVIDIA_VENDOR: Final = "0x10de"


class Device(NamedTuple):
    """A card as the driver lists it; None is what it does not tell."""

    uuid: str | None
    name: str | None


class Driver(NamedTuple):
    """What NVML answered.

    Attributes:
        detail: Its words, where it does not work.
        version: Of the driver, where it works.
        devices: All cards in PCI order, whatever `CUDA_VISIBLE_DEVICES` hides.
    """

    state: Literal["works", "no module", "no library", "not loaded", "mismatch", "denied", "failed"]
    detail: str = ""
    version: str | None = None
    devices: tuple[Device, ...] = ()


def look_at_driver() -> Driver:
    """Start NVML, ask for version and cards, and stop it."""
    try:
        import pynvml as nvml
    except ImportError:
        return Driver("no module")
    lib: Any = nvml  # it has no types

    def ask(question: Callable[..., T], *arguments: object) -> T | None:
        try:
            return question(*arguments)
        except lib.NVMLError:
            return None

    try:
        lib.nvmlInit()
    except lib.NVMLError as problem:
        state: Any = _CODES.get(getattr(problem, "value", 0), "failed")
        return Driver(state, str(problem))
    try:
        count = ask(lib.nvmlDeviceGetCount) or 0
        questions = (lib.nvmlDeviceGetUUID, lib.nvmlDeviceGetName)
        handles = [ask(lib.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        devices = tuple(
            Device(*(handle and ask(question, handle) for question in questions))
            for handle in handles
        )
        return Driver("works", version=ask(lib.nvmlSystemGetDriverVersion), devices=devices)
    finally:
        ask(lib.nvmlShutdown)


def nvidia_device(sysfs: Path = SYSFS_PCI, control: Path = Path("/dev/nvidiactl")) -> str | None:
    """Say where a card of NVIDIA shows itself without its driver's library; None where it does not.

    Args:
        sysfs: Folder of the PCI devices.
        control: The driver's device file, which a container has without the folder.
    """
    if control.exists():
        return str(control)
    for folder in sorted(sysfs.glob("*")):
        try:
            vendor, kind = ((folder / name).read_text().strip() for name in ("vendor", "class"))
        except (OSError, ValueError):
            continue
        if vendor == _NVIDIA_VENDOR and kind.startswith("0x03"):
            return f"PCI device {folder.name}"
    return None


def check_driver(driver: Driver, nvidia: str | None) -> list[Finding]:
    """Judge what NVML answered.

    Args:
        driver: Its answers.
        nvidia: Where a card of NVIDIA shows itself all the same.
    """
    detail = driver.detail
    if driver.state == "works":
        count = len(driver.devices)
        lost = sum(device.uuid is None for device in driver.devices)
        found = f"NVIDIA {driver.version or 'of unknown version'}, {count} GPU(s)"
        if lost:
            remedy = "see `nvidia-smi` and `dmesg`, then reset it or reboot"
            return [error(_DRIVER, f"{found}, {lost} without an answer", remedy)]
        if not count and nvidia is not None:
            remedy = "give the container its GPUs: start it with `--gpus all`"
            return [warning(_DRIVER, f"{found}, though there is one ({nvidia})", remedy)]
        return [ok(_DRIVER, found)]
    if driver.state == "mismatch":
        remedy = "reboot, or unload and load the kernel's module: it is older than the libraries"
        return [error(_DRIVER, f"NVML refuses to start: {detail}", remedy)]
    if driver.state == "denied":
        remedy = "let this user read and write `/dev/nvidia*` (its group, or the container's GPUs)"
        return [error(_DRIVER, f"NVML refuses to start: {detail}", remedy)]
    if nvidia is None and driver.state != "failed":
        return [ok(_DRIVER, "no GPU of NVIDIA is seen, and no NVML is needed")]
    if driver.state == "no module":
        found = f"the Python package nvidia-ml-py is missing, though there is a GPU ({nvidia})"
        return [warning(_DRIVER, found, "`pip install nvidia-ml-py`")]
    if driver.state == "no library":
        found = f"NVML is missing, though there is a GPU ({nvidia}): no memory figures"
        remedy = "install NVIDIA's driver; in a container start it with `--gpus all`"
        return [warning(_DRIVER, found, remedy)]
    remedy = "see `nvidia-smi` and `dmesg`; load the driver with `modprobe nvidia`"
    return [error(_DRIVER, f"NVML does not start: {detail}", remedy)]


def check_key(
    gpu: str | int | None, configured: str, environ: Mapping[str, str], devices: Sequence[Device]
) -> tuple[str | None, list[Finding]]:
    """Find the key as serve and the library do; returns it, None where there is none.

    Args:
        gpu: What `--gpu` said.
        configured: `gpu_key` of the settings, "" for none.
        environ: The environment.
        devices: What the driver lists.

    Raises:
        ConfigError: `gpu` is of no legal form.
    """
    named = configured if gpu is None else gpu
    if isinstance(named, str) and named:
        key = resolve_key(named)
        return key, [_named_key(key, _source(gpu, environ))]
    number = 0 if gpu is None else int(gpu or 0)
    try:
        key = gpu_key(number)
    except NoGpuError as problem:
        return None, [_no_key(str(problem), asked=gpu is not None, devices=devices)]
    if number == 0 and environ.get("OCGPU_GPU_KEY"):
        return key, [_named_key(key, "OCGPU_GPU_KEY")]
    return key, [_found_key(key)]


def _source(gpu: str | int | None, environ: Mapping[str, str]) -> str:
    if gpu is not None:
        return "`--gpu`"
    return "OCGPU_GPU_KEY" if environ.get("OCGPU_GPU_KEY") else _FILE


def _named_key(key: str, source: str) -> Finding:
    seen = [gpu.key for gpu in gpus()]
    if source == _FILE and key not in seen[:1]:
        found = f"{key}, from {source}, which serve alone reads: other programs do not use it"
        return warning(_KEY, found, "set `OCGPU_GPU_KEY` in the environment of all programs")
    if not seen:
        return ok(_KEY, f"{key}, from {source}; no GPU is seen here")
    if key in seen:
        return ok(_KEY, f"{key}, from {source}, is a GPU of this machine")
    found = f"{key}, from {source}, though the GPU is {seen[0]}: programs without it use that"
    remedy = "give the same name to all programs on this GPU, or to none"
    # A flag names what to look at; it is not what programs run by.
    return (
        ok(_KEY, f"{key}, from {source}") if source == "`--gpu`" else warning(_KEY, found, remedy)
    )


def _no_key(message: str, *, asked: bool, devices: Sequence[Device]) -> Finding:
    found, remedy = split_message(message)
    if asked or devices or message.startswith("no answer"):
        return error(_KEY, found, remedy)
    return warning(_KEY, f"{found}; pacers do not pace, and serve runs without a lease", remedy)


def _found_key(key: str) -> Finding:
    name = next((gpu.name for gpu in gpus() if gpu.key == key), None) or "unknown model"
    if not key.startswith("pci-"):
        return ok(_KEY, f"{key} ({name}), from the driver")
    if not name.startswith("10de:"):
        return ok(_KEY, f"{key} ({name}), from the PCI bus")
    found = f"{key} ({name}), from the PCI bus: programs that have NVML call it by its UUID"
    remedy = "let all programs use NVML, or set the same `OCGPU_GPU_KEY` for all"
    return warning(_KEY, found, remedy)


def check_cuda(environ: Mapping[str, str], devices: Sequence[Device]) -> list[Finding]:
    """Judge the variables by which CUDA hides and orders cards.

    Args:
        environ: The environment.
        devices: What the driver lists, in PCI order.
    """
    order = environ.get("CUDA_VISIBLE_DEVICES")
    entries = [] if order is None else [part.strip() for part in order.split(",")]
    shown = "unset" if order is None else f"`{order}`"
    if not devices:
        return [ok(_CUDA, f"CUDA_VISIBLE_DEVICES is {shown}; the driver lists no GPU to hide")]
    chosen = visible(order, [device.uuid for device in devices])
    if order is not None and not chosen:
        found = f"CUDA_VISIBLE_DEVICES is {shown} and hides all {len(devices)} GPU(s)"
        return [error(_CUDA, found, "unset it, or name a GPU by its UUID")]
    if order is not None and len(chosen) < len(entries):
        found = f"CUDA_VISIBLE_DEVICES is {shown}: `{entries[len(chosen)]}` ends the list"
        return [warning(_CUDA, found, "name GPUs that exist, by their UUIDs")]
    numbered = order is None or any(entry.isdigit() for entry in entries)
    different = len({device.name for device in devices}) > 1
    if numbered and different and environ.get("CUDA_DEVICE_ORDER") != _FIXED_ORDER:
        found = "the GPUs differ: CUDA counts the fastest first, ocgpu in the order of the PCI bus"
        return [warning(_CUDA, found, f"set `CUDA_DEVICE_ORDER={_FIXED_ORDER}`, or name by UUID")]
    return [ok(_CUDA, f"CUDA_VISIBLE_DEVICES is {shown}, {len(chosen)} GPU(s) visible")]
