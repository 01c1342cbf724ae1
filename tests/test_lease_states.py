"""The table of a lease's states and events, as `rust/core/src/lease/mod.rs` has it."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from ocgpu import Lease, LeaseError, lease_status
from tests.processes import run_forking
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")
STATES = ["free", "waiting", "held"]


class Case:
    """A lease that was brought into a state, and what its waiting thread ended with."""

    def __init__(self, state: str) -> None:
        self.lease = Lease()
        self.ended: list[BaseException | None] = []
        self._holder = Lease()
        self._thread: threading.Thread | None = None
        if state == "held":
            self.lease.acquire()
        elif state == "waiting":
            self._holder.acquire()
            self._thread = threading.Thread(target=self._wait)
            self._thread.start()
            wait_until(lambda: len(lease_status().waiters) == 1)

    def _wait(self) -> None:
        try:
            self.lease.acquire()
        except LeaseError as error:
            self.ended.append(error)
        else:
            self.ended.append(None)

    def let_go(self) -> None:
        """Give back what this case holds beside the lease, and collect its thread."""
        self._holder.release()
        if self._thread is not None:
            self._thread.join(20)


def nothing_is_left() -> bool:
    status = lease_status()
    return not status.held and not status.waiters and Lease().try_acquire()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("take", [Lease.try_acquire, Lease.acquire])
def test_taking(state: str, take: Callable[[Lease], object]) -> None:
    case = Case(state)

    if state == "free":
        take(case.lease)
        assert case.lease.held
    else:
        with pytest.raises(LeaseError, match="this object already"):
            take(case.lease)
        assert case.lease.held == (state == "held")

    case.let_go()
    case.lease.release()
    assert nothing_is_left()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_releasing(state: str, *, elsewhere: bool) -> None:
    case = Case(state)

    for _ in range(2):
        if elsewhere:
            thread = threading.Thread(target=case.lease.release)
            thread.start()
            thread.join(20)
        else:
            case.lease.release()

    assert not case.lease.held
    case.let_go()
    assert [type(end) for end in case.ended] == ([LeaseError] if state == "waiting" else [])
    assert nothing_is_left()


@pytest.mark.parametrize("state", ["free", "held"])
def test_forgetting(state: str) -> None:
    # One that waits is not forgotten: its thread has it.
    case = Case(state)

    del case.lease
    gc.collect()

    assert nothing_is_left()


ENDINGS = {
    "the interpreter exits": "sys.exit(0)",
    "os._exit": "os._exit(0)",
    "exec": "os.execv('/bin/sleep', ['sleep', '0'])",
    "an uncaught exception": "raise SystemError",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV": "os.kill(os.getpid(), signal.SIGSEGV)",
}
BEGINNINGS = {
    "free": "lease.acquire(); lease.release()",
    "waiting": (
        "threading.Thread(target=lease.acquire, daemon=True).start()\n"
        "while not ocgpu.lease_status().waiters: time.sleep(0.002)"
    ),
    "held": "lease.acquire()",
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("ending", ENDINGS)
def test_ending(state: str, ending: str) -> None:
    holder = Lease()
    if state == "waiting":
        holder.acquire()
    code = (
        "import ocgpu, os, signal, sys, threading, time\n"
        f"lease = ocgpu.Lease()\n{BEGINNINGS[state]}\nprint('there', flush=True)\n{ENDINGS[ending]}"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20)

    assert done.stdout == b"there\n", done.stderr
    assert lease_status().waiters == []
    holder.release()
    assert nothing_is_left()


@pytest.mark.parametrize("state", STATES)
def test_forking(state: str) -> None:
    code = (
        "import ocgpu, os, sys, threading, time\n"
        f"lease = ocgpu.Lease()\n{BEGINNINGS[state]}\n"
        "before = ocgpu.lease_status()\n"
        "if (child := os.fork()) == 0:\n"
        "    ok = not lease.held\n"
        "    lease.release(); lease.release()\n"
        "    ok = ok and ocgpu.lease_status() == before\n"
        f"    ok = ok and lease.try_acquire() == {state == 'free'}\n"
        "    os._exit(0 if ok else 1)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        f"print(code, lease.held == {state == 'held'}, ocgpu.lease_status() == before)\n"
        "os._exit(0)\n"
    )
    holder = Lease()
    if state == "waiting":
        holder.acquire()

    done = run_forking(code)

    assert done.stdout == "0 True True\n", done.stderr
    holder.release()
    assert nothing_is_left()
