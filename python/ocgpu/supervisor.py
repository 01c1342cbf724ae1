"""The parent of a command that `ocgpu run` runs: signals in, exit status out.

Signals are blocked and waited for one after the other instead of handled, so that none comes at a
wrong moment and each says where it came from. In the foreground of a terminal the command gets a
process group of its own and the terminal with it, so that Ctrl-C and Ctrl-Z reach it alone;
elsewhere, and in a pipeline, which must stay one group, it stays in the supervisor's group.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from ocgpu import _ocgpu
from ocgpu.lease import Lease, supervisor_note
from ocgpu.text import printable

__all__ = ["supervise"]

SIGNALLED: Final = 128
"""Added to the number of the signal that ended the command, as in a shell."""

# SIGCHLD, SIGTTIN and SIGTTOU are the supervisor's own, SIGTSTP stops it with the command.
_FORWARDED: Final = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGWINCH,
    signal.SIGCONT,
}
_AWAITED: Final = {*_FORWARDED, signal.SIGCHLD}
# Handing over the terminal from the background would stop us otherwise.
_BLOCKED: Final = {*_AWAITED, signal.SIGTTOU}
# `si_code` of what the terminal driver sends, always to a whole process group (sigaction(2)).
_FROM_KERNEL: Final = 0x80


def supervise(lease: Lease, argv: list[str], mask: set[int | signal.Signals]) -> int:
    """Run `argv` until it and all that it leaves behind have ended; returns its exit status.

    Args:
        lease: Held by the caller; the command holds it as well.
        argv: The command and its arguments.
        mask: Signals that the command shall find blocked. SIGCHLD is blocked in all threads.

    Raises:
        OSError: The command cannot be run.
    """
    _ocgpu.adopt_orphans()
    # A parent may have left it ignored, and then no child could be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        return _Command(lease, argv, mask).wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Command:
    """A command that runs."""

    def __init__(self, lease: Lease, argv: list[str], mask: set[int | signal.Signals]) -> None:
        terminal = _foreground_terminal()
        handles = lease._lend()  # offered for this module alone
        try:
            self._process = subprocess.Popen(  # noqa: S603  # the user asked for it
                argv,
                env={**os.environ, **supervisor_note(lease)},
                pass_fds=handles,
                process_group=None if terminal is None else 0,
                preexec_fn=lambda: _prepare(terminal, mask),
            )
        finally:
            for handle in handles:
                os.close(handle)
        self._lease = lease
        self._name = Path(argv[0]).name
        self._terminal = terminal
        self._status: int | None = None
        self._childless = False
        lease._record_as(self._process.pid, self._name)

    def wait(self) -> int:
        while self._status is None or not self._childless:
            info = signal.sigwaitinfo(_AWAITED)
            if info.si_signo == signal.SIGCHLD:
                self._reap()
            else:
                self._forward(
                    signal.Signals(info.si_signo), from_kernel=info.si_code == _FROM_KERNEL
                )
        return self._status

    def _reap(self) -> None:
        """Collect every child that has changed: one SIGCHLD may stand for several."""
        ended_before = self._status is not None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                self._childless = True
                return
            if pid == 0:
                break
            if pid == self._process.pid:
                self._changed(status)
        if self._status is not None and not ended_before:
            self._tell_of_orphans()

    def _changed(self, status: int) -> None:
        if os.WIFSTOPPED(status):
            if self._terminal is not None:
                # The shell waits for us: to stop as well makes it take the terminal back. What
                # comes next is SIGCONT.
                os.kill(os.getpid(), signal.SIGSTOP)
            return
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        self._status = code if code >= 0 else SIGNALLED - code
        if self._terminal is not None:
            os.tcsetpgrp(self._terminal, os.getpgrp())
            os.close(self._terminal)
            self._terminal = None

    def _tell_of_orphans(self) -> None:
        self._lease._record_as(os.getpid(), f"left by {self._name}")
        pids = ", ".join(map(str, _children()))
        sys.stderr.write(
            f"ocgpu: `{printable(self._name)}` has ended, but left processes that keep the lease: "
            f"pid {pids}\n"
        )
        sys.stderr.flush()

    def _forward(self, number: signal.Signals, *, from_kernel: bool) -> None:
        if self._status is not None:
            for pid in _children():
                os.kill(pid, number)
        elif self._terminal is not None:
            if number == signal.SIGCONT and os.tcgetpgrp(self._terminal) == os.getpgrp():
                os.tcsetpgrp(self._terminal, self._process.pid)
            os.killpg(self._process.pid, number)
        elif not from_kernel:
            # What the terminal sends goes to the whole group: the command has it already.
            os.kill(self._process.pid, number)


def _prepare(terminal: int | None, mask: set[int | signal.Signals]) -> None:
    """Run in the child, after it got its process group and before the command replaces it."""
    if terminal is not None:
        os.tcsetpgrp(terminal, os.getpid())
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _foreground_terminal() -> int | None:
    """Open the terminal that this process leads the foreground of, alone; None where it does not.

    A pipeline is one foreground job: taking the terminal from its other members would stop them.
    """
    interactive = sys.stdin.isatty() and sys.stdout.isatty() and os.getpgrp() == os.getpid()
    if not interactive:
        return None
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.tcgetpgrp(terminal) == os.getpgrp():
        return terminal
    os.close(terminal)
    return None


def _children() -> list[int]:
    """Pids of the children of this process, as far as the kernel lists them."""
    pid = os.getpid()
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(child) for child in listed.split()]
