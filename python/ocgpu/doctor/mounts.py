"""Which file system a path lies on, from `/proc/self/mountinfo` (proc(5))."""

import os
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mount", "mount_of", "parse_mounts"]


class Mount(NamedTuple):
    """One line of mountinfo.

    Attributes:
        device: Major and minor number.
        root: Which folder of the file system is mounted; `/` for all of it.
        point: Where.
        kind: Type of the file system, `tmpfs` or `fuse.sshfs`.
        source: What it is made of; of a tmpfs, any name.
    """

    device: tuple[int, int]
    root: str
    point: str
    kind: str
    source: str


def parse_mounts(text: str) -> list[Mount]:
    """Read the lines of mountinfo; lines of another form are passed over."""
    mounts = []
    for line in text.splitlines():
        front, dash, back = line.partition(" - ")
        fields, more = front.split(" "), back.split(" ")
        if not dash or len(fields) < 6 or len(more) < 2:
            continue
        major, _, minor = fields[2].partition(":")
        if not (major.isdigit() and minor.isdigit()):
            continue
        root, point, source = (_unescaped(part) for part in (fields[3], fields[4], more[1]))
        mounts.append(Mount((int(major), int(minor)), root, point, more[0], source))
    return mounts


def _unescaped(field: str) -> str:
    """Undo the octal escapes of white space and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    """Find what `path` lies on: of those mounted over one another, the last one."""
    real = path.resolve()
    over = [mount for mount in mounts if real.is_relative_to(mount.point)]
    if not over:
        return None
    deepest = max(len(mount.point) for mount in over)
    candidates = [mount for mount in over if len(mount.point) == deepest]
    number = real.stat().st_dev
    same = [m for m in candidates if m.device == (os.major(number), os.minor(number))]
    # A btrfs reports other device numbers in mountinfo than stat(2) does.
    return (same or candidates)[-1]
