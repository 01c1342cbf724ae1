"""What is taken of the memory of GPUs, and by which process, as NVML tells it.

NVML counts by process on the whole machine, under the pids of the machine: in a container it may
list nothing, or pids that mean nothing there.
"""

from typing import Any, Final, NamedTuple

from ocgpu.device import Nvml, as_key

__all__ = ["GpuMemory", "Reading"]

# What a driver takes for itself on the largest cards.
_OWN_BYTES: Final = 1 << 30
_UUID_PREFIXES: Final = ("GPU-", "MIG-")
_LOST: Final = "the driver does not find it"
_HIDDEN: Final = "the driver lists no process on a card that is in use"


class Reading(NamedTuple):
    """One look.

    Attributes:
        by_pid: Bytes by process; None where the driver does not tell.
        total: Bytes that are taken of the cards; None where no card answers.
        computing: Those of the processes that compute; the others draw.
        gap: Why a process that is not listed may hold memory all the same; None when it does not.
    """

    by_pid: dict[int, int | None]
    total: int | None
    computing: frozenset[int]
    gap: str | None


class GpuMemory:
    """What is taken, to be looked at several times.

    Every call may take as long as the driver likes: none of them belongs on an event loop.

    Args:
        nvml: Started; stopped by `close`.
        key: The GPU to look at; None is all, and so is a name that no driver gave.
    """

    __slots__ = ("_key", "_nvml")

    def __init__(self, nvml: Nvml, key: str | None = None) -> None:
        self._nvml = nvml
        self._key = key

    @classmethod
    def open(cls, key: str | None = None) -> "GpuMemory | None":
        """Start to look; None where NVML is absent or does not start."""
        nvml = Nvml.open()
        return None if nvml is None else cls(nvml, key)

    def read(self) -> Reading:
        """Look once."""
        self._nvml.error = None
        cards = _Cards(self._nvml)
        for card in self._cards():
            cards.add(card)
        if not cards.seen:
            cards.gap = cards.gap or self._nvml.error or "the driver knows no card"
        return Reading(cards.by_pid, cards.total, frozenset(cards.computing), cards.gap)

    def close(self) -> None:
        """Look no more."""
        self._nvml.close()

    def _cards(self) -> list[Any]:
        nvml, key = self._nvml, self._key
        handles = nvml.handles()
        if key is None or not key.startswith(_UUID_PREFIXES):
            return handles
        places = [*handles]
        if key.startswith("MIG-"):
            places += [mig for card in handles if card for mig in nvml.instances(card)]
        for place in places:
            uuid = nvml.uuid(place)
            if uuid is not None and as_key(uuid) == key:
                return [place]
        # It is lost. Those on the other cards are none of its processes.
        return [None]


class _Cards:
    """A reading in the making."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._questions = (
            ("nvmlDeviceGetComputeRunningProcesses", True),
            ("nvmlDeviceGetGraphicsRunningProcesses", False),
        )
        self.seen = False
        self.by_pid: dict[int, int | None] = {}
        self.total: int | None = None
        self.computing: set[int] = set()
        self.gap: str | None = None

    def add(self, card: Any) -> None:  # noqa: ANN401  # a handle of pynvml
        """Add what is taken of one card; None is one that is lost."""
        self.seen = True
        if card is None:
            self.gap = self._nvml.error or _LOST
            return
        memory = self._nvml.ask(self._nvml.lib.nvmlDeviceGetMemoryInfo, card)
        if memory is not None:
            self.total = (self.total or 0) + int(memory.used)
        processes = self._processes(card)
        if not processes and memory is not None and memory.used >= _OWN_BYTES:
            self.gap = self.gap or _HIDDEN
        for pid, size in processes.items():
            known = self.by_pid.get(pid, 0)
            self.by_pid[pid] = None if size is None or known is None else known + size

    def _processes(self, card: object) -> dict[int, int | None]:
        """Bytes by process on one card; one that computes and draws stands in both lists."""
        found: dict[int, int | None] = {}
        for question, computes in self._questions:
            for process in self._listed(question, card):
                size, known = process.usedGpuMemory, found.get(process.pid, 0)
                found[process.pid] = None if size is None or known is None else max(known, size)
                if computes:
                    self.computing.add(process.pid)
        return found

    def _listed(self, question: str, card: object) -> list[Any]:
        lib = self._nvml.lib
        answer: list[Any] | None
        try:
            answer = getattr(lib, question)(card)
        except lib.NVMLLibraryMismatchError:
            # A driver that is older than the bindings.
            answer = self._nvml.ask(getattr(lib, f"{question}_v2"), card)
        except lib.NVMLError as error:
            self._nvml.error = str(error)
            answer = None
        if answer is None:
            self.gap = self._nvml.error
        return answer or []
