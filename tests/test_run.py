"""`ocgpu run`: real commands under a real lease."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ocgpu import Lease, lease_status
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")

RUN = [sys.executable, "-m", "ocgpu", "run"]
# Says its pid, then waits for its standard input to close.
CHATTY = ["sh", "-c", "echo $$; cat"]
# The same in one process.
ALONE = [sys.executable, "-c", "import os; print(os.getpid(), flush=True); input()"]


def done(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *arguments], capture_output=True, text=True, check=False, timeout=25
    )


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A supervisor whose command runs, and the command's pid, which its first line says."""
    process = subprocess.Popen(
        [*RUN, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.communicate(timeout=20)


def until_recorded(pid: int) -> None:
    """The supervisor names the command as the holder after it has started."""
    wait_until(lambda: [holder.pid for holder in lease_status().holders] == [pid])


def is_stopped(pid: int) -> bool:
    return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()


def test_the_command_runs_under_the_lease_with_its_own_input_and_output() -> None:
    code = "import ocgpu, sys; print(ocgpu.lease_status().mode, sys.stdin.read())"

    result = subprocess.run(
        [*RUN, "--", sys.executable, "-c", code],
        input="in",
        capture_output=True,
        text=True,
        check=True,
    )

    assert (result.stdout, result.stderr) == ("exclusive in\n", "")
    assert not lease_status().held


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -TERM $$"], 128 + signal.SIGTERM),
        (["sh", "-c", "kill -KILL $$"], 128 + signal.SIGKILL),
        (["no-such-command-here"], 127),
        (["/etc/passwd"], 126),
        (["/"], 126),
    ],
)
def test_exit_status_is_that_of_a_shell(argv: list[str], status: int) -> None:
    assert done("--", *argv).returncode == status
    assert not lease_status().held


def test_a_command_that_cannot_run_is_named() -> None:
    assert "ocgpu: cannot run `no-such`: No such file" in done("--", "no-such").stderr


@pytest.mark.parametrize("flag", ["--shared", "--weight=2"])
def test_shared_and_weight_take_the_lease_shared(flag: str) -> None:
    with running(flag, "--", *CHATTY):
        assert lease_status().mode == "shared"


def test_options_of_the_command_are_its_own() -> None:
    assert done("--shared", "echo", "--timeout", "x").stdout == "--timeout x\n"
    assert done("--", "echo", "--", "a").stdout == "-- a\n"


@pytest.mark.parametrize("timeout", ["0", "10ms"])
def test_a_busy_or_late_lease_is_status_75_and_names_the_holder(timeout: str) -> None:
    with Lease(reason="mine"):
        result = done("--timeout", timeout, "--", "true")

    assert result.returncode == 75
    assert f'is held by pid {os.getpid()} ("' in result.stderr


def test_no_thread_of_a_waiting_run_can_take_the_signal_of_its_command() -> None:
    # One that ends after the wait would swallow it, and the command be waited for in vain.
    with Lease():
        waiting = subprocess.Popen([*RUN, "--", "true"], stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None
        waiting.stderr.readline()
        wait_until(lambda: lease_status().waiters, what="a waiter")
        tasks = list(Path(f"/proc/{waiting.pid}/task").iterdir())
        blocked = [(task / "status").read_text() for task in tasks]
    waiting.communicate(timeout=20)

    assert len(blocked) > 1
    masks = [int(re.search(r"SigBlk:\s*(\w+)", text)[1], 16) for text in blocked]
    assert all(mask >> (signal.SIGCHLD - 1) & 1 for mask in masks)


def test_the_command_finds_no_signal_blocked() -> None:
    code = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))"

    assert done("--", sys.executable, "-c", code).stdout == "set()\n"


def test_who_holds_is_said_once_while_waiting_with_foreign_text_escaped() -> None:
    with Lease(reason="fine\x1b[2J"):
        waiting = subprocess.Popen([*RUN, "--", "true"], stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None
        errors = waiting.stderr.readline()
    _, more = waiting.communicate(timeout=20)

    assert (waiting.returncode, more) == (0, "")
    assert f"ocgpu: waiting for the lease, held by pid {os.getpid()} " in errors
    assert "fine\\x1b[2J" in errors


def test_who_holds_is_said_again_every_minute() -> None:
    code = (
        "import ocgpu.run, sys\n"
        "assert ocgpu.run.TELL_INTERVAL == 60.0\n"
        "ocgpu.run.TELL_INTERVAL = 0.02\n"
        "sys.exit(ocgpu.run.run(ocgpu.Lease(), ['true']))\n"
    )
    with Lease(reason="a render"):
        waiting = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None
        lines = [waiting.stderr.readline() for _ in range(3)]
    waiting.communicate(timeout=20)

    assert waiting.returncode == 0
    assert all(line.endswith("for: a render\n") for line in lines), lines


def test_a_waiting_run_that_is_stopped_leaves_the_queue_and_comes_back() -> None:
    with Lease() as lease:
        waiter = subprocess.Popen([*RUN, "--", "true"], stderr=subprocess.DEVNULL)
        wait_until(lambda: lease.wanted() == 1)

        waiter.send_signal(signal.SIGTSTP)
        wait_until(lambda: is_stopped(waiter.pid))
        assert lease.wanted() == 0
        waiter.send_signal(signal.SIGCONT)
        wait_until(lambda: lease.wanted() == 1)

    assert waiter.wait(20) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command given"),
        (["--"], "no command given"),
        (["--timeout", "3", "--", "true"], "'3'; use a duration such as `1m30s`"),
        (["--weight", "nan", "--", "true"], "'nan'; use a number from 0.001 to 1000"),
        (["--weight", "0", "--", "true"], "use a number from 0.001 to 1000"),
        (["--gpu", "a/b", "--", "true"], "invalid `gpu`"),
        (["--reason", "x" * 201, "--", "true"], "invalid `reason`"),
    ],
)
def test_illegal_usage_is_refused_with_status_2(arguments: list[str], message: str) -> None:
    result = done(*arguments)

    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_passed_on(number: signal.Signals) -> None:
    code = (
        "import os, signal\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])\n"
        "print(os.getpid(), flush=True)\n"
        f"signal.sigwait([{int(number)}])\n"
        "os._exit(42)\n"
    )
    with running("--", sys.executable, "-c", code) as (supervisor, _):
        supervisor.send_signal(number)
        assert supervisor.wait(timeout=20) == 42


def test_the_command_starts_with_no_signal_blocked() -> None:
    result = done("--", "grep", "SigBlk", "/proc/self/status")

    assert int(result.stdout.split()[1], 16) == 0


def test_the_holder_is_the_command_and_its_reason() -> None:
    with running("--reason", "train", "--", *CHATTY) as (_, pid):
        until_recorded(pid)
        (holder,) = lease_status().holders

    assert (holder.pid, holder.name, holder.reason) == (pid, "sh", "train")


def test_killing_the_supervisor_leaves_the_command_its_lease() -> None:
    with running("--", *ALONE) as (supervisor, pid):
        until_recorded(pid)
        supervisor.kill()
        supervisor.wait()

        assert not Lease().try_acquire()
        status = lease_status()
        assert (status.mode, [holder.pid for holder in status.holders]) == ("exclusive", [pid])

        os.kill(pid, signal.SIGKILL)
        Lease().acquire(timeout=20)


def test_killing_the_command_frees_the_lease() -> None:
    with running("--", *ALONE) as (supervisor, pid):
        os.kill(pid, signal.SIGKILL)

        assert supervisor.wait(timeout=20) == 128 + signal.SIGKILL
        assert not lease_status().held


def test_what_the_command_leaves_behind_keeps_the_lease_until_it_ends() -> None:
    # The one that is left closes all descriptors that it does not know, as daemons do.
    code = (
        "import os, subprocess, sys\n"
        "left = subprocess.Popen(['sleep', '60'], stdout=2, close_fds=True)\n"
        "print(left.pid, flush=True)\n"
        "os._exit(3)\n"
    )
    with running("--", sys.executable, "-c", code) as (supervisor, left):
        assert supervisor.stderr is not None
        assert f"pid {left}\n" in supervisor.stderr.readline()
        assert not Lease().try_acquire()

        supervisor.terminate()

        assert supervisor.wait(timeout=20) == 3
        assert not Path(f"/proc/{left}").exists()
        assert Lease().try_acquire()


def test_the_supervisor_opens_no_way_to_the_lease_for_others() -> None:
    script = "for fd in /proc/self/fd/*; do readlink $fd; done | grep -c ocgpu"

    # Lease and gate, as the command must have them; nothing else of ours.
    assert done("--", "sh", "-c", script).stdout == "2\n"


@pytest.mark.parametrize(
    ("ours", "theirs", "refused"),
    [
        ([], "exclusive", True),
        ([], "shared", True),
        (["--shared"], "exclusive", True),
        (["--shared"], "shared", False),
    ],
)
@pytest.mark.parametrize("take", ["lease.acquire()", "asyncio.run(lease.aacquire())"])
def test_a_command_does_not_wait_for_its_own_supervisor(
    ours: list[str], theirs: str, take: str, *, refused: bool
) -> None:
    code = f"import asyncio, ocgpu; lease = ocgpu.Lease(mode={theirs!r}); {take}; print(lease.held)"

    result = done(*ours, "--", sys.executable, "-c", code)

    if refused:
        assert "is held by the `ocgpu run` above this process" in result.stderr
        assert result.returncode == 1
    else:
        assert (result.stdout, result.returncode) == ("True\n", 0)


def test_a_run_under_a_run_is_refused_with_the_reason() -> None:
    result = done("--", *RUN, "--", "true")

    assert result.returncode == 1
    assert "above this process" in result.stderr


def test_shared_commands_are_shown_and_not_their_supervisors() -> None:
    with (
        running("--shared", "--", *ALONE) as (_, one),
        running("--shared", "--", *ALONE) as (_, two),
        running("--shared", "--", *ALONE) as (_, three),
    ):
        wait_until(
            lambda: {holder.pid for holder in lease_status().holders} == {one, two, three},
            what="the commands alone",
        )


def test_a_reason_that_is_no_text_is_refused_with_its_legal_form() -> None:
    result = subprocess.run(
        [*RUN, "--reason", b"a\xff", "--", "true"], capture_output=True, text=True, timeout=20
    )

    assert result.returncode == 2
    assert result.stderr == "ocgpu: invalid `reason`: 'a\\udcff'; use a text\n"


def test_a_time_out_is_said_as_it_was_asked() -> None:
    with Lease():
        result = done("--timeout", "20ms", "--", "true")

    assert "not granted within 0.02 s" in result.stderr
