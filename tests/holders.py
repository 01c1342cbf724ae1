"""Processes that hold a lease until they are told to end, or are killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Holder", "holder"]

# Says `held`, waits for its standard input to close, and leaves without releasing.
_CODE = """
import os, sys, ocgpu
lease = ocgpu.Lease(mode=sys.argv[1], reason="a test")
lease.acquire()
print("held", flush=True)
sys.stdin.read()
os._exit(0)
"""


class Holder:
    """Another process with the lease of `OCGPU_GPU_KEY`.

    Args:
        mode: How it holds it.
    """

    def __init__(self, mode: str = "exclusive") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CODE, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_held(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self.process.kill()

    def end(self) -> None:
        """Let it leave without releasing, and collect it."""
        self.process.communicate(timeout=20)


@contextmanager
def holder(mode: str = "exclusive") -> Iterator[Holder]:
    """Start one, wait until it holds, and end it afterwards."""
    started = Holder(mode)
    try:
        started.wait_held()
        yield started
    finally:
        started.end()
