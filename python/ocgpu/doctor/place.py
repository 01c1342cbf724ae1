"""The directory of segments and lease files: may we write there, and do its locks exclude?"""

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from ocgpu.doctor.finding import Finding, error, ok, warning
from ocgpu.doctor.mounts import Mount

__all__ = [
    "Locks",
    "check_directory",
    "check_file_system",
    "check_locks",
    "is_network",
    "judge_locks",
]

_DIRECTORY: Final = "directory"
_FILE_SYSTEM: Final = "file system"
_LOCKS: Final = "locks"
_NETWORK: Final = frozenset(
    (
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "smb3",
        "smbfs",
    )
)
_IN_MEMORY: Final = frozenset(("ramfs", "tmpfs"))
_NEEDED_BYTES: Final = 4 * 4096  # a segment, a lease file, its queue, and one to spare
_LOCAL: Final = "set `OCGPU_DIR` to a local directory, the same for all programs"
# Ends with 1 where it gets the lock that its parent holds, 0 where it does not.
_OTHER_PROCESS: Final = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(0)
sys.exit(1)
"""


def check_directory(path: Path) -> list[Finding]:
    """See that this user can make and open files in `path`."""
    name = f"`{path}`"
    create = "create it, or set `OCGPU_DIR` to one that exists"
    try:
        if not path.is_dir():
            what = "is no directory" if path.exists() else "does not exist"
            return [error(_DIRECTORY, f"{name} {what}", create)]
        space = os.statvfs(path)
    except OSError as problem:
        return [error(_DIRECTORY, f"{name}: {problem.strerror}", "let this user enter it")]
    if space.f_flag & os.ST_RDONLY:
        return [error(_DIRECTORY, f"{name} is mounted read-only", "mount it for writing")]
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        found = f"{name} cannot be written by uid {os.geteuid()}"
        return [error(_DIRECTORY, found, f"`chmod 1777 {path}`, or set `OCGPU_DIR` to another one")]
    room = space.f_bavail * space.f_frsize
    if space.f_blocks and room < _NEEDED_BYTES:
        return [error(_DIRECTORY, f"{name} is full: {room} bytes left", "make room there")]
    if not space.f_favail and space.f_files:
        return [error(_DIRECTORY, f"{name} has no inode left", "delete files there")]
    return [ok(_DIRECTORY, f"{name} can be written by uid {os.geteuid()}")]


def is_network(mount: Mount) -> bool:
    """Whether the files are those of another machine."""
    return mount.kind in _NETWORK


def check_file_system(mount: Mount) -> list[Finding]:
    """Judge what the directory lies on."""
    kind = f"{mount.kind} at `{mount.point}`"
    if is_network(mount):
        found = f"{kind}: its locks are not those of this machine's kernel, and can hang"
        return [error(_FILE_SYSTEM, found, _LOCAL)]
    if mount.kind == "overlay":
        found = f"{kind}: another container has another file of the same name"
        remedy = "use one directory of the host in all containers, by a bind mount or `--ipc=host`"
        return [warning(_FILE_SYSTEM, found, remedy)]
    if mount.kind.startswith("fuse") or mount.kind == "virtiofs":
        found = f"{kind}: a program serves these files, and need not share locks or memory"
        return [warning(_FILE_SYSTEM, found, _LOCAL)]
    if mount.kind in _IN_MEMORY:
        return [ok(_FILE_SYSTEM, f"{kind}, in memory")]
    return [ok(_FILE_SYSTEM, f"{kind}, on a disk: usable, in memory it would cost no writes")]


class Locks(NamedTuple):
    """What happened to a probe file: None = excludes as it should, else what it does instead.

    Attributes:
        flock: flock(2) between two descriptions of this process.
        other_process: flock(2) between two processes.
        ofd: A byte lock of an open file description (fcntl(2), `F_OFD_SETLK`).
    """

    flock: str | None
    other_process: str | None
    ofd: str | None


def check_locks(path: Path) -> list[Finding]:
    """Try both kinds of lock on a file of our own in `path`, which is removed again."""
    try:
        first, name = tempfile.mkstemp(prefix=".ocgpu-doctor-", dir=path)
    except OSError as problem:
        found = f"no file can be made in `{path}`: {problem.strerror}"
        return [error(_LOCKS, found, "see the findings on the directory")]
    try:
        second = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            locks = _try_locks(first, second, name)
        finally:
            os.close(second)
    finally:
        os.close(first)
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
    return judge_locks(locks)


def _try_locks(first: int, second: int, name: str) -> Locks:
    ofd = _exclusion(_ofd_lock, first, second)
    flock = _exclusion(_flock, first, second)
    return Locks(flock, None if flock is not None else _other_process(name), ofd)


def _exclusion(lock: Callable[[int], None], first: int, second: int) -> str | None:
    try:
        lock(first)
        lock(second)
    except BlockingIOError:
        return None
    except OSError as problem:
        return f"{problem.strerror}"
    return "two hold it at once"


def _flock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _ofd_lock(file: int) -> None:
    command = getattr(fcntl, "F_OFD_SETLK", None)
    if command is None:
        raise OSError(0, "this platform has none")
    # struct flock: type, whence, start, length, pid, which must be 0.
    fcntl.fcntl(file, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 2**30, 1, 0))


def _other_process(name: str) -> str | None:
    command = [sys.executable, "-I", "-S", "-c", _OTHER_PROCESS, name]
    done = subprocess.run(command, capture_output=True, timeout=20, check=False)  # noqa: S603
    return {0: None, 1: "two processes hold it at once"}.get(
        done.returncode, "a process cannot try it"
    )


def judge_locks(locks: Locks) -> list[Finding]:
    """Judge what happened to the probe file."""
    broken = locks.flock or locks.other_process
    if broken is not None:
        return [error(_LOCKS, f"flock does not work there: {broken}", _LOCAL)]
    if locks.ofd is not None:
        found = f"flock works; OFD locks do not: {locks.ofd}; one file a slot takes their place"
        return [warning(_LOCKS, found, "use a kernel with OFD locks to see a dead peer at once")]
    return [ok(_LOCKS, "flock and OFD locks exclude, also between processes")]
