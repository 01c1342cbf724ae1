"""Which GPU: the key that all processes of a machine agree on, and what the driver says about it.

Sources, the first that knows a device wins, never mixed:

1. NVML, in the order of `CUDA_VISIBLE_DEVICES`. The key is the driver's UUID. With MIG enabled on a
   card it is the UUID of the instance that CUDA would use, the first one.
2. Apple: `metal-0`, there is one GPU.
3. `/sys/bus/pci/devices`: display devices of NVIDIA, AMD and Intel. The key is a hash. Others of
   that class (bochs, virtio, cirrus, the ASPEED or Matrox chip of a server's remote console) draw
   a picture and compute nothing: taking one for a GPU would make CPU-only machines pace.

Numbers in `CUDA_VISIBLE_DEVICES` count in PCI order here; CUDA itself counts the fastest card first
unless `CUDA_DEVICE_ORDER=PCI_BUS_ID`. On a machine with different cards set that, or use UUIDs.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from ocgpu._ocgpu import GPU_KEY_FORM, is_gpu_key
from ocgpu.errors import ConfigError, NoGpuError
from ocgpu.text import printable

__all__ = ["Gpu", "Nvml", "as_key", "gpu_argument", "gpu_key", "gpus", "resolve_key", "visible"]

T = TypeVar("T")

SYSFS_PCI: Final = Path("/sys/bus/pci/devices")
_REMEDY: Final = "set `OCGPU_GPU_KEY` or pass `gpu=` with any name that the processes agree on"
_DISPLAY_CLASS: Final = "0x03"  # PCI base class: VGA, XGA, 3D and other display controllers
# In this order: who has a card beside the processor's own graphics means the card.
_VENDORS: Final = ("0x10de", "0x1002", "0x8086")  # NVIDIA, AMD, Intel


class Gpu:
    """One GPU that this process may use. What the driver does not tell is None.

    Written out, because `dataclasses` would be half of the time that `import ocgpu` takes.
    """

    __slots__ = ("_values",)

    def __init__(
        self,
        key: str,
        name: str | None,
        index: int,
        memory_total_bytes: int | None = None,
        memory_free_bytes: int | None = None,
    ) -> None:
        self._values = (key, name, index, memory_total_bytes, memory_free_bytes)

    @property
    def key(self) -> str:
        """Names the GPU for every process of the machine."""
        return self._values[0]

    @property
    def name(self) -> str | None:
        """The product's name."""
        return self._values[1]

    @property
    def index(self) -> int:
        """The number by which `gpu_key` and CUDA know it in this process."""
        return self._values[2]

    @property
    def memory_total_bytes(self) -> int | None:
        """Memory of the device."""
        return self._values[3]

    @property
    def memory_free_bytes(self) -> int | None:
        """Memory that nobody had taken at the time of asking."""
        return self._values[4]

    def __eq__(self, other: object) -> bool:
        return self._values == other._values if isinstance(other, Gpu) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values)

    def __repr__(self) -> str:
        return f"<Gpu {self.index} {self.key} {self.name!r}>"


def gpu_key(device: int = 0, *, sysfs: Path = SYSFS_PCI) -> str:
    """Name the GPU with number `device`, the same for all processes of this machine.

    `OCGPU_GPU_KEY` stands for device 0, with or without a GPU; the others are always looked up.

    Args:
        device: Number in the order that CUDA shows to this process, from 0.
        sysfs: Folder of the PCI devices, where NVML is absent.

    Raises:
        ConfigError: `device` is no number from 0 on, or `OCGPU_GPU_KEY` is no legal key.
        NoGpuError: There is no such GPU; the message says why and what to do.
    """
    if isinstance(device, bool) or not isinstance(device, int) or device < 0:
        raise ConfigError(f"invalid `device`: {device!r}; use a whole number from 0 on")
    override = os.environ.get("OCGPU_GPU_KEY", "")
    if override and device == 0:
        return _checked(override, "OCGPU_GPU_KEY")
    found = _found(sysfs)
    if device >= len(found):
        raise NoGpuError(_why_none(device, len(found)))
    gpu = found[device]
    if isinstance(gpu, str):
        raise NoGpuError(f"no answer from GPU {device}: {gpu}; reset it, or {_REMEDY}")
    return gpu.key


def gpus(*, sysfs: Path = SYSFS_PCI) -> list[Gpu]:
    """List the GPUs that this process may use, in CUDA's order, without those that do not answer.

    Args:
        sysfs: Folder of the PCI devices, where NVML is absent.
    """
    return [gpu for gpu in _found(sysfs) if isinstance(gpu, Gpu)]


def resolve_key(gpu: str | int | None = None) -> str:
    """Turn what a caller said into a key.

    Args:
        gpu: A key, any name or a device UUID; the number of a device; None asks `OCGPU_GPU_KEY`,
            then takes device 0.

    Raises:
        ConfigError: `gpu` or `OCGPU_GPU_KEY` is not of a legal form.
        NoGpuError: No name was given and there is no such GPU.
    """
    if gpu is None:
        return gpu_key()
    if isinstance(gpu, str):
        return _checked(gpu, "gpu")
    if isinstance(gpu, bool) or not isinstance(gpu, int) or gpu < 0:
        raise ConfigError(f"invalid `gpu`: {gpu!r}; use a device number or {GPU_KEY_FORM}")
    return gpu_key(gpu)


def gpu_argument(text: str) -> str | int:
    """Read `--gpu`: digits are the number of a device; no driver names one by digits alone."""
    return int(text) if text.isascii() and text.isdigit() else text


def visible(order: str | None, uuids: Sequence[str | None]) -> list[int | str]:
    """Read `CUDA_VISIBLE_DEVICES` as CUDA does: numbers of devices, or MIG UUIDs as they are.

    Args:
        order: The variable; None when it is not set, which shows all devices.
        uuids: UUID of each device in PCI order, None where it is not known.

    An entry that names no device hides itself and all behind it; so do -1 and an empty text.
    """
    if order is None:
        return list(range(len(uuids)))
    chosen: list[int | str] = []
    for entry in (part.strip() for part in order.split(",")):
        if entry.startswith("MIG-"):
            chosen.append(entry)
            continue
        if re.fullmatch(r"[0-9]{1,9}", entry):
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [i for i, uuid in enumerate(uuids) if _is_prefix(entry, uuid)]
        if len(matches) != 1:
            break
        chosen += matches
    return chosen


def _is_prefix(entry: str, uuid: str | None) -> bool:
    return entry.startswith("GPU-") and uuid is not None and uuid.startswith(entry)


def _checked(key: str, name: str) -> str:
    if not key.isascii() or not is_gpu_key(key):
        raise ConfigError(f"invalid `{name}`: {printable(key)}; use {GPU_KEY_FORM}")
    return key


def _why_none(device: int, count: int) -> str:
    if count:
        return f"no GPU {device}: this process sees {count}; use a lower number, or {_REMEDY}"
    order = os.environ.get("CUDA_VISIBLE_DEVICES")
    if order is None:
        return f"no GPU found: neither NVML nor `{SYSFS_PCI}` shows one; {_REMEDY}"
    return f"no GPU found: `CUDA_VISIBLE_DEVICES` is {printable(order)}; change it, or {_REMEDY}"


def _found(sysfs: Path) -> list[Gpu | str]:
    """All GPUs by number; in the place of one that has no key, the reason."""
    found = _nvml_gpus()
    if found is not None:
        return found
    if sys.platform == "darwin":
        return [Gpu(key="metal-0", name="Apple GPU", index=0)]
    return list(_pci_gpus(sysfs))


def _nvml_gpus() -> list[Gpu | str] | None:
    """What NVML shows; None where it is absent, does not start or knows no device at all."""
    nvml = Nvml.open()
    if nvml is None:
        return None
    try:
        return nvml.visible_gpus()
    finally:
        nvml.close()


class Nvml:
    """The questions that we ask NVML, between its start and its stop; each of them may fail.

    Attributes:
        lib: `pynvml` itself.
        error: What the last question that failed was answered.
    """

    __slots__ = ("error", "lib")

    def __init__(self, lib: Any) -> None:  # noqa: ANN401  # pynvml has no types
        self.lib = lib
        self.error: str | None = None

    @classmethod
    def open(cls) -> "Nvml | None":
        """Start NVML; None where it is absent or does not start."""
        try:
            import pynvml as nvml
        except ImportError:
            return None
        lib: Any = nvml
        try:
            lib.nvmlInit()
        except lib.NVMLError:
            return None
        return cls(lib)

    def close(self) -> None:
        """Stop NVML."""
        self.ask(self.lib.nvmlShutdown)

    def ask(self, question: Callable[..., T], *arguments: object) -> T | None:
        """Ask one question; None when it has no answer, and then `error` says why."""
        try:
            return question(*arguments)
        except self.lib.NVMLError as error:
            self.error = str(error)
            return None

    def handles(self) -> list[Any]:
        """Give the cards in PCI order; None in the place of one that is lost."""
        count = self.ask(self.lib.nvmlDeviceGetCount) or 0
        return [self.ask(self.lib.nvmlDeviceGetHandleByIndex, index) for index in range(count)]

    def uuid(self, handle: object) -> str | None:
        """Give the UUID of a card or an instance; None for None, and when it has none."""
        if handle is None:
            return None
        uuid: str | None = self.ask(self.lib.nvmlDeviceGetUUID, handle)
        return uuid

    def instances(self, card: object) -> list[Any]:
        """Give the MIG instances of a card."""
        mode = self.ask(self.lib.nvmlDeviceGetMigMode, card)
        if mode is None or mode[0] != self.lib.NVML_DEVICE_MIG_ENABLE:
            return []
        count = self.ask(self.lib.nvmlDeviceGetMaxMigDeviceCount, card) or 0
        question = self.lib.nvmlDeviceGetMigDeviceHandleByIndex
        handles = [self.ask(question, card, index) for index in range(count)]
        return [handle for handle in handles if handle is not None]

    def visible_gpus(self) -> list[Gpu | str] | None:
        """List what CUDA shows; None where there is no card at all."""
        handles = self.handles()
        if not handles:
            return None
        uuids = [self.uuid(handle) for handle in handles]
        chosen = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
        return [
            self._instance(entry, handles, index)
            if isinstance(entry, str)
            else self._card(handles[entry], index)
            for index, entry in enumerate(chosen)
        ]

    def _card(self, handle: object, index: int) -> Gpu | str:
        if handle is None:
            return "NVML gives no handle for it"
        instances = self.instances(handle)
        return self._gpu(instances[0] if instances else handle, index)

    def _instance(self, entry: str, handles: Sequence[object], index: int) -> Gpu | str:
        for handle in (mig for card in handles if card for mig in self.instances(card)):
            uuid = self.uuid(handle)
            if uuid is not None and uuid.startswith(entry):
                return self._gpu(handle, index)
        # The old spelling MIG-GPU-<uuid>/<gi>/<ci>, or one that NVML does not list.
        return Gpu(key=_checked(as_key(entry), "CUDA_VISIBLE_DEVICES"), name=None, index=index)

    def _gpu(self, handle: object, index: int) -> Gpu | str:
        uuid = self.uuid(handle)
        if uuid is None:
            return self.error or "NVML gives no UUID for it"
        memory = self.ask(self.lib.nvmlDeviceGetMemoryInfo, handle)
        return Gpu(
            key=_checked(as_key(uuid), "UUID"),
            name=self.ask(self.lib.nvmlDeviceGetName, handle),
            index=index,
            memory_total_bytes=None if memory is None else int(memory.total),
            memory_free_bytes=None if memory is None else int(memory.free),
        )


def as_key(uuid: str) -> str:
    """Spell a UUID of the driver as a key: that of an old MIG instance has slashes."""
    return uuid.replace("/", "_")


def _pci_gpus(sysfs: Path) -> list[Gpu]:
    try:
        folders = sorted(sysfs.iterdir(), key=lambda folder: folder.name)
    except OSError:
        return []
    devices = [
        (vendor, _attribute(folder, "device"), folder.name)
        for folder in folders
        if _attribute(folder, "class").startswith(_DISPLAY_CLASS)
        and (vendor := _attribute(folder, "vendor")) in _VENDORS
    ]
    devices.sort(key=lambda device: _VENDORS.index(device[0]))
    chosen = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), [None] * len(devices))
    return [
        _pci_gpu(index, *devices[entry])
        for index, entry in enumerate(chosen)
        if isinstance(entry, int)
    ]


def _pci_gpu(index: int, vendor: str, device: str, address: str) -> Gpu:
    name = f"{vendor.removeprefix('0x')}:{device.removeprefix('0x')}"
    return Gpu(key=f"pci-{_fnv1a(f'{name} {address}'.encode()):016x}", name=name, index=index)


def _fnv1a(data: bytes) -> int:
    """Hash to 64 bits. It need not withstand anybody, and `hashlib` would slow `import ocgpu`.

    http://www.isthe.com/chongo/tech/comp/fnv/
    """
    digest = 0xCBF29CE484222325
    for byte in data:
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return digest


def _attribute(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="ascii").strip().lower()
    except (OSError, ValueError):
        return ""
