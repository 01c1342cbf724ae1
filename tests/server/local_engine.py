"""A process that listens as an engine does, with a grandchild as its runner."""

import contextlib
import subprocess
import sys

import psutil

from tests.waiting import wait_until

__all__ = ["LocalEngine"]

# Listens, starts a child that has a child, and says its port. The last one holds the memory.
ENGINE = """
import socket, subprocess, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], 0), family=family)
sleep = "import time; time.sleep(100)"
between = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
child = subprocess.Popen([sys.executable, "-c", between])
print(listener.getsockname()[1], flush=True)
time.sleep(100)
"""


class LocalEngine:
    """A process that listens, with a grandchild.

    Attributes:
        port: Where it listens.
        pid: Its own.
        worker: The grandchild's.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        command = [sys.executable, "-c", ENGINE, host]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.pid = self._process.pid
        own = psutil.Process(self.pid)
        family = wait_until(lambda: (f := own.children(recursive=True)) and len(f) == 2 and f)
        self.worker = family[-1].pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            for process in (*own.children(recursive=True), own):
                process.kill()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()
