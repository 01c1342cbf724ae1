"""The machine-wide lease on one GPU: who may be resident on the card."""

import os
from pathlib import Path
from types import EllipsisType
from typing import Literal, Self, cast

from ocgpu import _ocgpu, arguments
from ocgpu._ocgpu import LeaseParty, LeaseStatus
from ocgpu.device import resolve_key
from ocgpu.errors import LeaseError
from ocgpu.readable import readable

__all__ = ["Lease", "LeaseParty", "LeaseStatus", "lease_status", "supervisor_note"]

_SUPERVISOR = "OCGPU_RUN_LEASE"


class Lease(_ocgpu.Lease):
    """A machine-wide claim on one GPU, held until released or until the process dies.

    The kernel excludes the others and frees the lease of a process that ends, however it ends. Who
    waits is served first come, first served, and sleeps until then.
    One object holds the lease once: for a second claim make a second object, also in the same
    process, where the two exclude each other. There is no upgrade from shared to exclusive and no
    downgrade: release, then acquire the other. A forked child does not hold its parent's lease.

    Args:
        gpu: Device UUID (`GPU-...`), any name that all holders agree on, or a device number.
            None asks `OCGPU_GPU_KEY`, then takes the first GPU.
        mode: `"exclusive"` excludes everybody, `"shared"` only exclusive holders.
        timeout: Seconds to wait, for `with` and wherever a call names no other. 0 tries once, None
            waits for ever.
        reason: Why, for those who have to wait; at most 200 bytes.
        path: The lease file, instead of the one of `gpu`.

    Raises:
        ConfigError: An argument is outside its legal form.
        NoGpuError: Neither `gpu` nor `path` is given, and this machine has no GPU.
    """

    __slots__ = ("__weakref__", "_supervised", "_timeout")
    _supervised: bool
    _timeout: float | None

    def __new__(
        cls,
        gpu: str | int | None = None,
        mode: Literal["exclusive", "shared"] = "exclusive",
        *,
        timeout: float | None = None,
        reason: str | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Make a lease; nothing is taken yet."""
        seconds = _seconds(timeout)
        cls._check_timeout(seconds)
        arguments.text("mode", mode, "`exclusive` or `shared`")
        if reason is not None:
            arguments.text("reason", reason, "a text")
        key = None if path is not None else resolve_key(gpu)
        file = None if path is None else Path(path)
        self = cast("Self", super().__new__(cls, key, mode, reason=reason, path=file))
        self._timeout = seconds
        self._supervised = _held_by_supervisor(self)
        return self

    def acquire(self, *, timeout: float | EllipsisType | None = ...) -> None:
        """Take the lease, waiting for it where another has it. Ctrl-C ends the wait.

        Args:
            timeout: Seconds to wait; 0 tries once, None waits for ever. Without it, the object's.

        Raises:
            LeaseBusyError: `timeout` is 0 and another process holds it; `.holder` is a pid or None.
            LeaseTimeoutError: `timeout` seconds passed.
            LeaseError: This object holds it or waits for it already, another thread released the
                object during the wait, the `ocgpu run` above this process holds it, or the file
                cannot be used.
        """
        if self._supervised:
            self._try_under_supervisor()
            return
        self._acquire(self._timeout if timeout is ... else _seconds(timeout))

    async def aacquire(self, *, timeout: float | EllipsisType | None = ...) -> None:
        """Take the lease as `acquire` does, while the event loop goes on.

        When the task is cancelled, the lease is not held afterwards, also where it came in the same
        moment.
        """
        if self._supervised:
            self._try_under_supervisor()
            return
        seconds = self._timeout if timeout is ... else _seconds(timeout)
        wait = self._start(seconds)
        if wait is None:
            return
        try:
            await readable(wait, seconds)
            self._finish(wait)
        except TimeoutError:
            self._stop(wait, seconds or 0.0)
        except BaseException:
            wait.cancel()
            raise

    def _try_under_supervisor(self) -> None:
        """Take the lease without waiting for a supervisor, which itself waits for us to end."""
        if not self.try_acquire():
            raise LeaseError(
                f"lease not taken: `{self.path}` is held by the `ocgpu run` above this process, "
                "which waits for it to end; take the lease in one of the two"
            )

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        await self.aacquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "held" if self.held else "not held"
        return f"<Lease {str(self.path)!r} {self.mode}, {state}>"


def supervisor_note(lease: Lease) -> dict[str, str]:
    """What `ocgpu run` leaves in its command's environment: the lease that it holds, and how."""
    return {_SUPERVISOR: f"{lease.mode}:{lease.path}"}


def _held_by_supervisor(lease: Lease) -> bool:
    mode, _, path = os.environ.get(_SUPERVISOR, "").partition(":")
    return path == str(lease.path) and "exclusive" in {mode, lease.mode}


def _seconds(timeout: object) -> float | None:
    """Check the type of a time-out; its value is checked where it is used."""
    if timeout is None or type(timeout) is float:
        return timeout
    return arguments.number("timeout", timeout, "a number of seconds, or None to wait for ever")


def lease_status(
    gpu: str | int | None = None, path: str | os.PathLike[str] | None = None
) -> LeaseStatus:
    """Look at a lease without touching it: no acquisition anywhere is disturbed by it.

    `held` and `mode` are right for all leases of ocgpu. Names and waiters are hints, which their
    processes wrote; waiters stand in the order in which they will be served. Locks that other
    programs put on the file (`flock(1)`), and their waiters, are seen in `/proc/locks` where that
    can be read; a program that only tries now and then is not seen waiting. The kernel may take
    20 ms for that.

    Args:
        gpu: As for `Lease`.
        path: The lease file, instead of the one of `gpu`.

    Raises:
        ConfigError: An argument is outside its legal form.
        LeaseError: What stands at the path is not a lease file or cannot be read.
        NoGpuError: Neither `gpu` nor `path` is given, and this machine has no GPU.
    """
    if path is not None:
        return _ocgpu.lease_status(None, Path(path))
    return _ocgpu.lease_status(resolve_key(gpu))
