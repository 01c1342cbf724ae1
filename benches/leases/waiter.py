"""Another process that takes a lock whenever it is told to: `python -m benches.leases.waiter`."""

import sys
import time
from pathlib import Path

from benches.leases.contenders import CONTENDERS


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
