"""A Python process that does what a test tells it, line by line."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.waiting import wait_until

__all__ = ["Remote", "remote", "remotes"]

LOOP = """
import json, logging, os, signal, sys, time
from pathlib import Path
from ocgpu import Lease, Pacer, peers
logging.getLogger("ocgpu").addHandler(logging.NullHandler())
for line in sys.stdin:
    code = json.loads(line)
    try:
        try:
            parsed = compile(code, "<told>", "eval")
        except SyntaxError:
            parsed = compile(code, "<told>", "exec")
        answer = {"answer": eval(parsed, globals())}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
"""


class Remote:
    """The process; `Lease`, `Pacer` and `peers` are imported in it, and os, signal, sys, time.

    Args:
        prefix: Goes before the command, such as `unshare` and its options.
        environ: What it gets in its environment, over this process's own.
        umask: Of the process; None for this process's own.
    """

    def __init__(
        self,
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        umask: int | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environ or {})},
            umask=-1 if umask is None else umask,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, code: str, watchdog: float = 20.0) -> Any:  # noqa: ANN401  (what was asked for)
        """Evaluate an expression, or run statements, there.

        Raises:
            AssertionError: It raised, died, or did not answer within `watchdog` seconds.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(code).encode() + b"\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], watchdog)
        assert ready, f"no answer within {watchdog} s: {code}"
        line = self.process.stdout.readline()
        assert line, f"died of {self.process.wait(10)}: {code}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["answer"]

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self.process.kill()
        self.process.wait(10)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP for the length of the block, in which it must not be asked anything."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def remote(
    prefix: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    umask: int | None = None,
) -> Iterator[Remote]:
    """Start one; it ends with the block. Arguments as of `Remote`."""
    started = Remote(prefix, environ, umask)
    try:
        yield started
    finally:
        started.end()


@contextmanager
def remotes(*names: str) -> Iterator[list[Remote]]:
    """Start one process a name, each with a `pacer` that was joined in this order."""
    with ExitStack() as stack:
        started = [stack.enter_context(remote()) for _ in names]
        for process, name in zip(started, names, strict=True):
            process.ask(f"pacer = Pacer(name={name!r})")
        yield started


def wait_for_names(process: Remote, expected: set[str], watchdog: float = 20.0) -> None:
    """Until the live peers that its pacer sees, itself not among them, are these."""
    look = "[peer.name for peer in pacer.snapshot().peers if peer.alive]"
    wait_until(lambda: set(process.ask(look)) == expected, watchdog, f"the peers {expected}")
