"""`ocgpu run`: hold the lease of a GPU for as long as a command runs.

The command and its supervisor share the handle of the lease, so that it is free when the last of
both has ended: even `kill -9` of the supervisor leaves the command its lease. A command that closes
descriptors which it does not know keeps the lease only as long as the supervisor lives.

Processes that the command leaves behind may still be on the card: the supervisor adopts them and
keeps the lease until they have ended too.
"""

import argparse
import os
import signal
import sys
import threading
import time
from typing import Any, Final, NoReturn

from ocgpu.device import gpu_argument
from ocgpu.durations import DURATION_FORM, parse_duration
from ocgpu.errors import LeaseError
from ocgpu.lease import Lease, LeaseParty, lease_status
from ocgpu.pacer import weight_argument
from ocgpu.supervisor import supervise
from ocgpu.text import printable

__all__ = ["add_parser", "run"]

CANNOT_EXECUTE: Final = 126
"""Exit status for a command that is there and cannot be run, as in a shell."""
NOT_FOUND: Final = 127
"""Exit status for a command that is not there, as in a shell."""
TELL_INTERVAL: Final = 60.0
"""Seconds between two messages to a person who waits."""

_EPILOG: Final = (
    "Exit status: the command's own; 75 when the lease is busy or timed out; 126 or 127 when the "
    "command cannot be run or found; 128+n when signal n ended it; 1 or 2 when the lease cannot be "
    "used or the arguments are illegal."
)


def add_parser(subparsers: Any) -> None:  # noqa: ANN401  # argparse keeps this type private
    """Add `run` to the commands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="run a command while holding the lease of the GPU",
        description="Run a command while holding the lease of the GPU, waiting for it first.",
        epilog=_EPILOG,
        usage="ocgpu run [OPTION ...] -- COMMAND [ARGUMENT ...]",
    )
    parser.add_argument(
        "--gpu",
        type=gpu_argument,
        metavar="GPU",
        help="a key or any agreed name, or the number of a device (default: OCGPU_GPU_KEY, else 0)",
    )
    parser.add_argument("--shared", action="store_true", help="together with other shared holders")
    parser.add_argument(
        "--timeout",
        type=_timeout,
        metavar="DURATION",
        help="wait that long at most, such as 30s; 0 does not wait (default: for ever)",
    )
    parser.add_argument("--reason", metavar="TEXT", help="tell those who wait what this is for")
    parser.add_argument(
        "--weight",
        type=weight_argument,
        metavar="W",
        help="implies --shared: for a command whose own Pacer has weight W",
    )
    parser.add_argument("argv", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def command(arguments: argparse.Namespace) -> int:
        argv: list[str] = arguments.argv
        if argv[:1] == ["--"]:
            argv = argv[1:]
        if not argv:
            _refuse(parser)
        shared = arguments.shared or arguments.weight is not None
        lease = Lease(arguments.gpu, "shared" if shared else "exclusive", reason=arguments.reason)
        return run(lease, argv, timeout=arguments.timeout)

    parser.set_defaults(command=command)


def run(lease: Lease, argv: list[str], *, timeout: float | None = None) -> int:
    """Run `argv` under `lease`; returns the exit status that a shell would give it.

    Args:
        lease: Not held yet, and not held any more afterwards.
        argv: The command and its arguments.
        timeout: Seconds to wait for the lease; 0 tries once, None waits for ever.

    Raises:
        LeaseBusyError: `timeout` is 0 and another process holds the lease.
        LeaseTimeoutError: `timeout` seconds passed.
    """
    # Before any thread is made: one that does not block it could take the signal of the command's
    # end, in the moment in which it ends itself after a wait, and nobody would be told.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        return _run(lease, argv, timeout, mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run(
    lease: Lease, argv: list[str], timeout: float | None, mask: set[int | signal.Signals]
) -> int:
    if not lease.try_acquire():
        if timeout == 0.0:
            lease.acquire(timeout=0)
        else:
            _wait(lease, timeout)
    try:
        return supervise(lease, argv, mask)
    except OSError as error:
        _say(f"cannot run `{printable(argv[0])}`: {error.strerror or error}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
    finally:
        lease.release()


def _wait(lease: Lease, timeout: float | None) -> None:
    """Wait for `lease`, and say who has it: once, then every minute."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.is_set():
            holders = _holders(lease)
            if not lease.held:
                _say(f"waiting for the lease, held by {holders}")
            ended.wait(TELL_INTERVAL)

    teller = threading.Thread(target=tell, name="ocgpu-run", daemon=True)
    teller.start()
    try:
        _queue(lease, timeout)
    finally:
        ended.set()
        teller.join()


def _queue(lease: Lease, timeout: float | None) -> None:
    """Acquire `lease`; Ctrl-Z leaves the queue: a stopped process would hold up the others."""

    def suspend(*_: object) -> NoReturn:
        raise _SuspendedError

    deadline = None if timeout is None else time.monotonic() + timeout
    before = signal.signal(signal.SIGTSTP, suspend)
    try:
        left = timeout
        while not lease.held:
            try:
                lease.acquire(timeout=left)
            except _SuspendedError:
                lease.release()
                os.kill(os.getpid(), signal.SIGSTOP)
                left = None if deadline is None else max(deadline - time.monotonic(), 0.001)
    finally:
        signal.signal(signal.SIGTSTP, before)


class _SuspendedError(Exception):
    """The terminal told us to stop."""


def _holders(lease: Lease) -> str:
    try:
        holders = lease_status(path=lease.path).holders
    except LeaseError:
        holders = []
    return ", ".join(map(_describe, holders)) or "an unknown process"


def _describe(holder: LeaseParty) -> str:
    words = [f"pid {holder.pid}" if holder.pid is not None else "an unknown process"]
    if holder.name is not None:
        words.append(f"({printable(holder.name)})")
    if holder.reason is not None:
        words.append(f"for: {printable(holder.reason)}")
    return " ".join(words)


def _say(message: str) -> None:
    sys.stderr.write(f"ocgpu: {message}\n")
    sys.stderr.flush()


def _refuse(parser: argparse.ArgumentParser) -> NoReturn:
    parser.error("no command given: write it after `--`, as in `ocgpu run -- python train.py`")


def _timeout(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; use {DURATION_FORM}") from None
