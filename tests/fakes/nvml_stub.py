"""The driver's library, compiled from `nvml_stub.c`, for processes with the real nvidia-ml-py.

A process that gets `environ` sees three cards; a test changes what they say while it runs.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["ERRORS", "GIB", "UUIDS", "Driver", "compile_stub"]

GIB = 2**30
UUIDS = ("GPU-aaaa1111-0000", "GPU-aaaa2222-0000", "GPU-bbbb3333-0000")
ERRORS = {"NOT_SUPPORTED": 3, "NO_PERMISSION": 4, "DRIVER_NOT_LOADED": 9, "GPU_IS_LOST": 15}

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


def compile_stub(folder: Path, *flags: str) -> Path:
    """Compile the library into `folder` and return that; skips the test without a C compiler."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: `cc` is not installed")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", *FLAGS, *flags, SOURCE, "-o", library], check=True, timeout=60)
    return folder


class Driver:
    """What the library says, to be changed by a test at any time.

    Args:
        library: The folder of `libnvidia-ml.so.1`.
        path: Where the answers are written.

    Attributes:
        environ: What makes a process load it.
        lines: The answers by key, as the source of the library describes them.
    """

    def __init__(self, library: Path, path: Path) -> None:
        self._path = path
        self.environ = {"LD_LIBRARY_PATH": str(library), "NVML_STUB": str(path)}
        self.lines: dict[str, str] = {}
        self._processes: list[str] = []
        self._write()

    def set(self, **values: int | str) -> None:
        """Change answers: `used_0=GIB` is `used:0`."""
        self.lines |= {name.replace("_", ":"): str(value) for name, value in values.items()}
        self._write()

    def fail(self, function: str, code: int) -> None:
        """Have a function answer an error; 0 mends it."""
        self.lines[f"fail:{function}"] = str(code)
        self._write()

    def slow(self, function: str, milliseconds: int) -> None:
        """Have a function take its time."""
        self.lines[f"slow:{function}"] = str(milliseconds)
        self._write()

    def holds(
        self, *processes: tuple[int, int | None], card: int = 0, how: str = "compute"
    ) -> None:
        """Have these processes, and no others in that list, hold so many bytes of a card."""
        kind = f"{how}:{card} "
        others = [line for line in self._processes if not line.startswith(kind)]
        own = [f"{kind}{pid} {-1 if size is None else size}" for pid, size in processes]
        self._processes = others + own
        self._write()

    def calls(self, function: str) -> int:
        """How often a function was called."""
        notes = self._path.with_name(f"{self._path.name}.calls")
        return notes.read_text().splitlines().count(function) if notes.exists() else 0

    def _write(self) -> None:
        """Replace the answers in one step: a reader sees the old ones or the new ones."""
        lines = [f"{key} {value}" for key, value in self.lines.items()] + self._processes
        draft = self._path.with_name(f"{self._path.name}.draft")
        draft.write_text("".join(f"{line}\n" for line in lines))
        draft.replace(self._path)
