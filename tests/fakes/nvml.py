"""A stand-in for `pynvml` with three GPUs, each answer of which can be made to fail."""

from dataclasses import dataclass, field
from types import SimpleNamespace

GIB = 2**30


class NvmlError(Exception):
    """What every call of NVML may raise."""


@dataclass
class Process:
    """What one process holds of one card; None where the driver does not tell."""

    pid: int
    usedGpuMemory: int | None  # noqa: N815 - NVML's own name


@dataclass
class Card:
    """One GPU, or one MIG instance of a GPU, as NVML describes it."""

    uuid: str
    name: str
    total: int
    free: int
    instances: list["Card"] = field(default_factory=list)
    computing: list[Process] = field(default_factory=list)
    drawing: list[Process] = field(default_factory=list)


@dataclass
class FakeNvml:
    """Put it into `sys.modules["pynvml"]`.

    Attributes:
        failing: Functions that fail; with a UUID behind a colon, for that card only:
            `nvmlDeviceGetName:GPU-b…`.
        started: How often it was started and not yet stopped.
        reads: How often the memory of the first card's processes was asked for.
    """

    cards: list[Card]
    failing: set[str] = field(default_factory=set)
    started: int = 0
    reads: int = 0

    NVMLError = NvmlError
    NVML_DEVICE_MIG_ENABLE = 1

    def _answer(self, function: str, card: Card | None = None) -> None:
        if function in self.failing or (card and f"{function}:{card.uuid}" in self.failing):
            raise NvmlError("GPU is lost")

    def nvmlInit(self) -> None:  # noqa: N802
        self._answer("nvmlInit")
        self.started += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.started -= 1
        self._answer("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._answer("nvmlDeviceGetCount")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        self._answer("nvmlDeviceGetHandleByIndex", self.cards[index])
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: Card) -> str:  # noqa: N802
        self._answer("nvmlDeviceGetUUID", card)
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> str:  # noqa: N802
        self._answer("nvmlDeviceGetName", card)
        return card.name

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> SimpleNamespace:  # noqa: N802
        self._answer("nvmlDeviceGetMemoryInfo", card)
        return SimpleNamespace(total=card.total, free=card.free, used=card.total - card.free)

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[Process]:  # noqa: N802
        self._answer("nvmlDeviceGetComputeRunningProcesses", card)
        self.reads += card is self.cards[0]
        return card.computing

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: Card) -> list[Process]:  # noqa: N802
        self._answer("nvmlDeviceGetGraphicsRunningProcesses", card)
        return card.drawing

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:  # noqa: N802
        self._answer("nvmlDeviceGetMigMode", card)
        return [int(bool(card.instances))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:  # noqa: N802
        self._answer("nvmlDeviceGetMaxMigDeviceCount", card)
        return 7 if card.instances else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:  # noqa: N802
        if index >= len(card.instances):
            raise NvmlError("Not Found")
        return card.instances[index]


def three_gpus() -> FakeNvml:
    """Two big cards and a small one, in PCI order."""
    return FakeNvml(
        [
            Card("GPU-aaaa1111-0000", "NVIDIA H200", 139 * GIB, 100 * GIB),
            Card("GPU-aaaa2222-0000", "NVIDIA H200", 139 * GIB, 139 * GIB),
            Card("GPU-bbbb3333-0000", "NVIDIA T4", 15 * GIB, 1 * GIB),
        ]
    )
