"""The locks that are compared, each as a library's user would take it, with its own defaults."""

import asyncio
import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import fasteners
import filelock
import portalocker

from ocgpu import Lease

__all__ = ["ASYNC", "CONTENDERS", "FLOOR", "SYNC", "Contender"]

FLOOR, SYNC, ASYNC = "flock(2), file kept open", "ocgpu.Lease", "ocgpu.Lease, async"


class Contender(Protocol):
    """A lock on one file."""

    def acquire(self) -> None:
        """Take it, waiting as this library does by default."""

    def release(self) -> None:
        """Give it back."""


class Flock:
    """The floor: flock(2) on a file that stays open, through Python's `fcntl`."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open("rb+")

    def acquire(self) -> None:
        """Take it."""
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Give it back."""
        fcntl.flock(self._file, fcntl.LOCK_UN)


class AsyncLease:
    """`Lease.aacquire` on an event loop of its own."""

    def __init__(self, path: Path) -> None:
        self._lease = Lease(path=path)
        self._loop = asyncio.new_event_loop()

    def acquire(self) -> None:
        """Take it."""
        self._loop.run_until_complete(self._lease.aacquire())

    def release(self) -> None:
        """Give it back."""
        self._lease.release()


class Portalocker:
    """`portalocker.Lock`, which waits 5 s at most unless it is told otherwise."""

    def __init__(self, path: Path) -> None:
        self._lock = portalocker.Lock(path, timeout=60)

    def acquire(self) -> None:
        """Take it."""
        self._lock.acquire()

    def release(self) -> None:
        """Give it back."""
        self._lock.release()


CONTENDERS: dict[str, Callable[[Path], Contender]] = {
    FLOOR: Flock,
    SYNC: lambda path: Lease(path=path),
    ASYNC: AsyncLease,
    "filelock.FileLock": filelock.FileLock,
    "fasteners.InterProcessLock": fasteners.InterProcessLock,
    "portalocker.Lock": Portalocker,
}
"""By name, the floor first."""
