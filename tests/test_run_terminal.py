"""`ocgpu run` as a job of a real terminal: foreground, Ctrl-C, Ctrl-Z."""

import os
import pty
import select
import signal
import sys
import time

import pytest

from ocgpu import lease_status
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

RUN = [sys.executable, "-m", "ocgpu", "run"]


class Terminal:
    """`ocgpu run` as the foreground job of a terminal of its own."""

    def __init__(self, *argv: str) -> None:
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            os.execv(RUN[0], [*RUN, "--", *argv])  # noqa: S606
        self.seen = b""

    def until(self, text: bytes) -> None:
        deadline = time.monotonic() + 20
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self._end], [], [], 0.1)[0]:
                self.seen += os.read(self._end, 4096)

    def type(self, keys: bytes) -> None:
        os.write(self._end, keys)

    def foreground(self) -> int:
        return os.tcgetpgrp(self._end)

    def status(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._end)
        return code


def test_in_a_terminal_the_command_has_the_foreground_and_ctrl_c_reaches_it_once() -> None:
    code = (
        "import os, signal\n"
        "seen = []\n"
        "signal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "print('pid', os.getpid(), os.getpgrp(), 'ready', flush=True)\n"
        "input()\n"
        "print('interrupts', len(seen), flush=True)\n"
    )
    terminal = Terminal(sys.executable, "-c", code)
    terminal.until(b"ready")
    pid, group = map(int, terminal.seen.split(b"pid ")[1].split()[:2])

    assert pid == group == terminal.foreground() != terminal.pid
    terminal.type(b"\x03")
    terminal.until(b"^C")
    terminal.type(b"\n")
    terminal.until(b"interrupts 1")
    assert terminal.status() == 0


def test_ctrl_z_stops_the_job_and_continuing_it_gives_the_terminal_back() -> None:
    code = "print('ready', flush=True); input(); print('went on', flush=True)"
    terminal = Terminal(sys.executable, "-c", code)
    terminal.until(b"ready")
    group = terminal.foreground()

    terminal.type(b"\x1a")
    _, status = os.waitpid(terminal.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert lease_status().held

    os.kill(terminal.pid, signal.SIGCONT)
    wait_until(lambda: terminal.foreground() == group)
    terminal.type(b"\n")
    terminal.until(b"went on")
    assert terminal.status() == 0
