"""Another process that takes a lock whenever it is told to: `python -m benches.leases.waiter`."""

import subprocess
import sys
import time
from pathlib import Path

from benches.leases.contenders import CONTENDERS


class Waiter:
    """That process, as the one that holds the lock sees it."""

    def __init__(self, name: str, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benches.leases.waiter", name, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def begin(self) -> None:
        """Let it wait for the lock."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")

    def came_ns(self) -> int:
        """When its wait ended, on the monotonic clock of the machine."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def end(self) -> None:
        """Let it leave."""
        self._process.communicate(timeout=20)


def main() -> None:
    """For each line of stdin: wait for the lock, give it back, and print when it came."""
    name, path = sys.argv[1:]
    lock = CONTENDERS[name](Path(path))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        lock.acquire()
        came_ns = time.monotonic_ns()
        lock.release()
        sys.stdout.write(f"{came_ns}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
