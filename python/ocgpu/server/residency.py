"""The machine's lease, held for the engines behind us: what lets serve share a card with strangers.

| held      | while                                                                             |
|-----------|-----------------------------------------------------------------------------------|
| nothing   | nothing is in flight and nothing of ours is resident                              |
| shared    | an LLM request runs, or a model may still be on the card                          |
| exclusive | an image job runs, or a batch of them                                             |

There is no upgrade in between: the card is emptied, one lease is given up, the other is queued for,
first come, first served, with everybody else. What an engine leaves on the card is not known here:
whoever calls `give_up` has seen to it.
"""

import asyncio
import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any, Final, Literal

from ocgpu.device import resolve_key
from ocgpu.errors import OcgpuError
from ocgpu.lease import Lease, lease_status
from ocgpu.server.refusal import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ELSEWHERE", "Residency", "lease_key"]

logger: Final = logging.getLogger("ocgpu.server")

# A waiter is noticed after this; a look costs some microseconds.
_LOOK_SECONDS: Final = 0.1
# A stranger that computes does so for minutes.
_RETRY_AFTER: Final = 30

ELSEWHERE: Final = "the engines are on another host"

Mode = Literal["shared", "exclusive"]


class Residency:
    """Takes the lease for our engines, and says when somebody else wants it.

    Args:
        gpu_key: What the lease is on; None where serve runs without.
        reason: Why it runs without; None where it does not.
        wait_timeout: Seconds that a request waits for another holder; 0 is no limit.
    """

    def __init__(self, gpu_key: str | None, reason: str | None, wait_timeout: float) -> None:
        self._key = gpu_key
        self._reason = reason
        self._wait_timeout = wait_timeout
        self._lease: Lease | None = None
        self._since: float | None = None
        self._sharing: asyncio.Task[None] | None = None
        self._sharers = 0
        self._waiting = 0
        self._watch: asyncio.Task[None] | None = None
        # Told once, in the loop, when somebody waits for what we hold.
        self.on_wanted: Callable[[], None] = _nothing

    @property
    def enabled(self) -> bool:
        """Whether serve takes part in the machine's lease."""
        return self._key is not None

    @property
    def mode(self) -> str | None:
        """How the lease is held; None when it is not."""
        return None if self._lease is None else self._lease.mode

    @property
    def wanted(self) -> bool:
        """Whether somebody else waits for the lease that we hold."""
        return self._lease is not None and self._lease.wanted() > 0

    async def share(self) -> None:
        """Hold the lease shared. Any number of requests may wait for it at once.

        Raises:
            RefusedError: Another holder did not give it up in time.
        """
        if self._key is None or self.mode == "shared":
            return
        if self._sharing is None:
            self._sharing = asyncio.ensure_future(self._acquire("shared", "LLM requests"))
            self._sharing.add_done_callback(self._shared)
        waiting = self._sharing
        self._sharers += 1
        try:
            async with asyncio.timeout(self._wait_timeout or None):
                await asyncio.shield(waiting)
        except TimeoutError:
            raise await self._refusal() from None
        finally:
            self._sharers -= 1
            if not self._sharers and not waiting.done():
                # Nobody waits any more: a place in the queue would hold up others. Who comes in
                # this moment must not wait for what is cancelled.
                waiting.cancel()
                self._forget(waiting)

    def try_share(self) -> bool:
        """Hold the lease shared if that needs no wait; whether it is, or needs not be."""
        if self._key is None or self.mode == "shared":
            return True
        return self._sharing is None and self._lease is None and self._try("shared", "LLM requests")

    async def take(self) -> None:
        """Hold the lease exclusive; a shared one is given up before, for there is no upgrade.

        Raises:
            RefusedError: As `share`.
        """
        if self.try_take():
            return
        try:
            async with asyncio.timeout(self._wait_timeout or None):
                await self._acquire("exclusive", "image job")
        except TimeoutError:
            raise await self._refusal() from None

    def try_take(self) -> bool:
        """Hold the lease exclusive if that needs no wait; whether it is, or needs not be."""
        if self._key is None or self.mode == "exclusive":
            return True
        self.give_up()
        return self._try("exclusive", "image job")

    def give_up(self) -> None:
        """Release the lease. Nothing of ours may be on the card. Twice is harmless."""
        lease, self._lease = self._lease, None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if lease is not None:
            lease.release()
            self._since = None
            logger.info("lease: released", extra={"mode": lease.mode})

    def document(self) -> dict[str, Any]:
        """Give what `/healthz` says."""
        if self._key is None:
            return {"enabled": False, "reason": self._reason}
        held = None if self._since is None else round(time.monotonic() - self._since, 3)
        return {
            "enabled": True,
            "mode": self.mode,
            "held_seconds": held,
            "waiting": self._waiting > 0,
            "wanted": self.wanted,
        }

    async def close(self) -> None:
        """Leave the queue and release."""
        if self._sharing is not None:
            self._sharing.cancel()
            await asyncio.gather(self._sharing, return_exceptions=True)
        self.give_up()

    def _make(self, mode: Mode, what: str) -> Lease:
        return Lease(self._key, mode, reason=f"ocgpu serve: {what}")

    def _try(self, mode: Mode, what: str) -> bool:
        """Take the lease if it is free; True as well where it cannot be used at all."""
        try:
            lease = self._make(mode, what)
            if not lease.try_acquire():
                return False
        except OcgpuError as error:
            self._do_without(error)
            return True
        self._hold(lease, 0.0)
        return True

    async def _acquire(self, mode: Mode, what: str) -> None:
        began = time.monotonic()
        try:
            lease = self._make(mode, what)
            logger.info("lease: waiting for another process", extra={"mode": mode})
            self._waiting += 1
            try:
                await lease.aacquire(timeout=None)
            finally:
                self._waiting -= 1
        except OcgpuError as error:
            self._do_without(error)
        else:
            self._hold(lease, time.monotonic() - began)

    def _do_without(self, error: OcgpuError) -> None:
        """Serve on without the lease: a place that cannot be used must stop nobody's chat."""
        self._key = None
        self._reason = str(error)
        logger.warning("serving without the machine's lease: %s", error)

    def _hold(self, lease: Lease, waited: float) -> None:
        self._lease = lease
        self._since = time.monotonic()
        self._watch = asyncio.ensure_future(self._look_for_waiters(lease))
        logger.info("lease: acquired", extra={"mode": lease.mode, "waited": round(waited, 3)})

    def _forget(self, task: "asyncio.Task[None]") -> None:
        if self._sharing is task:
            self._sharing = None

    def _shared(self, task: "asyncio.Task[None]") -> None:
        self._forget(task)
        if not task.cancelled():
            # Marks it as seen: those who waited for it may all have left.
            task.exception()

    async def _look_for_waiters(self, lease: Lease) -> None:
        while not lease.wanted():  # noqa: ASYNC110  # the kernel's locks tell nobody
            await asyncio.sleep(_LOOK_SECONDS)
        logger.info("lease: wanted by another process", extra={"mode": lease.mode})
        self.on_wanted()

    async def _refusal(self) -> RefusedError:
        """Say who has the card."""
        seconds = f"{self._wait_timeout:g}s"
        holders = []
        with contextlib.suppress(OcgpuError, OSError):
            status = await asyncio.to_thread(lease_status, self._key)
            holders = [_described(party) for party in status.holders]
        who = f" by {', '.join(holders)}" if holders else ""
        message = f"the gpu is leased{who} and did not come free within {seconds}"
        return RefusedError("lease", message, _RETRY_AFTER)


def _described(party: Any) -> str:  # noqa: ANN401  # LeaseParty is a class of the compiled core
    name = party.name or "a process"
    pid = "" if party.pid is None else f" (pid {party.pid})"
    reason = "" if not party.reason else f": {party.reason}"
    return f"{name}{pid}{reason}"


def _nothing() -> None:
    """Nobody is told."""


def lease_key(gpu_key: str, *, on: bool, local: bool) -> tuple[str | None, str | None]:
    """Give the key of the lease that serve takes part in, or None and why it does not.

    Args:
        gpu_key: As in the settings; "" asks the driver.
        on: Whether the settings ask for the lease.
        local: Whether an engine is on this machine.
    """
    if not on:
        return None, "switched off by `LEASE`"
    if not local:
        return None, ELSEWHERE
    try:
        key = resolve_key(gpu_key or None)
        folder = Lease(key).path.parent
    except OcgpuError as error:
        return None, str(error)
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return None, f"no folder that can be written to: `{folder}`; set `OCGPU_DIR`"
    return key, None
