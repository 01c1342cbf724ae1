"""Which processes have a file of ocgpu open or mapped, and which file it really is (proc(5)).

A process that this one may not look into, for it belongs to another user or container, is counted
and passed over.
"""

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Identity", "Use", "Uses", "find_uses", "flocked", "is_stopped"]

Identity = tuple[int, int]
"""Device and inode."""

_PROC: Final = Path("/proc")
_DELETED: Final = " (deleted)"
# `1: FLOCK  ADVISORY  WRITE 4711 00:1b:5448974 0 EOF`
_FLOCK: Final = re.compile(
    r"^\d+: FLOCK +\w+ +\w+ +-?\d+ +([0-9a-f]+):([0-9a-f]+):(\d+) ", re.MULTILINE
)


class Use(NamedTuple):
    """A process and one file.

    Attributes:
        command: Its command name, as it wrote it.
        path: The file's path, as that process sees it.
        identity: Which file it is.
        elsewhere: Whether the process has mounts of its own, as in a container.
    """

    pid: int
    command: str
    path: Path
    identity: Identity
    elsewhere: bool


class Uses(NamedTuple):
    """All that could be seen, and how many processes could not be looked at."""

    seen: list[Use]
    hidden: int


def find_uses(names: Collection[str]) -> Uses:
    """Look for files of these names, whatever directory they lie in, in all other processes."""
    seen: list[Use] = []
    hidden = 0
    own_mounts = Path("/proc/self/ns/mnt").readlink()
    for folder in _PROC.glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        try:
            files = dict(_files(folder, names))
            elsewhere = bool(files) and (folder / "ns/mnt").readlink() != own_mounts
            command = (folder / "comm").read_text(errors="replace").strip() if files else ""
        except PermissionError:
            hidden += _is_program(folder)
            continue
        except (OSError, ValueError):  # it ended meanwhile
            continue
        pid = int(folder.name)
        seen += [Use(pid, command, path, which, elsewhere) for path, which in files.items()]
    return Uses(sorted(seen), hidden)


def _is_program(folder: Path) -> bool:
    """Whether it is no thread of the kernel, which has no files; everybody may see that."""
    try:
        return (folder / "cmdline").read_bytes() != b""
    except OSError:
        return False


def _files(folder: Path, names: Collection[str]) -> Iterator[tuple[Path, Identity]]:
    for line in (folder / "maps").read_text(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and (path := _named(fields[5], names)):
            major, minor = (int(part, 16) for part in fields[3].split(":"))
            yield path, (os.makedev(major, minor), int(fields[4]))
    # Behind the maps, for this is the better source where a process has both: stat(2) of the file.
    for entry in (folder / "fd").iterdir():
        try:
            path = _named(str(entry.readlink()), names)
            if path is not None:
                found = entry.stat()
                yield path, (found.st_dev, found.st_ino)
        except FileNotFoundError:  # closed meanwhile
            continue


def _named(text: str, names: Collection[str]) -> Path | None:
    path = Path(text.removesuffix(_DELETED))
    return path if path.name in names else None


def flocked(locks: str) -> set[Identity]:
    """Read which files have a flock(2) on them, out of the text of `/proc/locks`.

    Those who wait for one, and locks without a file, are passed over.
    """
    return {
        (os.makedev(int(found[1], 16), int(found[2], 16)), int(found[3]))
        for found in _FLOCK.finditer(locks)
    }


def is_stopped(pid: int) -> bool:
    """Whether a process of this pid namespace stands still by a signal or under a debugger."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in {"T", "t"}
