"""`ocgpu doctor` on peers, proxies and the lease."""

import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ocgpu import Lease, Pacer, peers
from ocgpu.doctor import company
from ocgpu.doctor.finding import Finding
from tests.fakes import Engines
from tests.holders import holder
from tests.processes import Processes
from tests.remote import remote, remotes
from tests.server.served import start_serve
from tests.waiting import wait_until

PYTHON = Path(sys.executable).name[:15]  # as the kernel keeps it
pytestmark = pytest.mark.usefixtures("gpu_dir")


def registry(key: str) -> Finding:
    return company.check_registry(key)[0]


def serves(key: str) -> Finding:
    return company.check_registry(key)[1]


def lease(key: str) -> Finding:
    (finding,) = company.check_lease(key)
    return finding


def test_an_empty_registry_is_well(gpu_key: str) -> None:
    assert registry(gpu_key) == Finding("registry", "ok", "0 peers")
    assert serves(gpu_key) == Finding("serves", "ok", "0 on this GPU")


def test_peers_are_named_and_their_names_escaped(gpu_key: str) -> None:
    with Pacer(name="a chat\u202e") as pacer:
        assert pacer.enabled
        finding = registry(gpu_key)

    assert finding.status == "ok"
    assert finding.found.startswith("1 peers: a chat\\u202e (")
    assert finding.found.endswith(", idle)")


def test_a_stopped_peer_is_a_warning(gpu_key: str) -> None:
    with remotes("slow") as (slow,), slow.stopped():
        wait_until(lambda: [peer.state for peer in peers(gpu_key).peers] == ["stopped"], 20)

        finding = registry(gpu_key)

    assert finding.status == "warning"
    assert f"`kill -CONT {slow.pid}`" in str(finding.remedy)


def test_a_full_registry_is_a_warning(gpu_key: str) -> None:
    with ExitStack() as stack:
        for number in range(company.SLOTS - 1):
            stack.enter_context(Pacer(name=str(number)))
        assert registry(gpu_key).status == "ok"
        last = stack.enter_context(Pacer(name="last"))
        assert last.slot == company.SLOTS - 1

        finding = registry(gpu_key)
        assert Pacer(name="one too many").slot is None

    assert (finding.status, finding.found.startswith("full, all 16 slots")) == ("warning", True)


def test_a_segment_that_is_none_is_an_error_with_the_remedy_of_the_core(
    gpu_dir: Path, gpu_key: str
) -> None:
    (gpu_dir / f"opencoti-gpu-{gpu_key}").write_bytes(b"FOREIGN!".ljust(4096, b"\0"))

    (finding,) = company.check_registry(gpu_key)

    assert finding.status == "error"
    assert "wrong magic" in finding.found
    assert "when nobody uses it" in str(finding.remedy)


def test_two_serves_on_one_card_are_an_error(
    gpu_key: str, engines: Engines, processes: Processes, tmp_path: Path
) -> None:
    first = start_serve(processes, engines, tmp_path / "first")
    assert serves(gpu_key) == Finding("serves", "ok", "1 on this GPU")

    second = start_serve(processes, engines, tmp_path / "second")
    finding = serves(gpu_key)

    assert finding.status == "error"
    assert f"(pids {first.process.pid}, {second.process.pid})" in finding.found
    second.stop()
    assert serves(gpu_key).status == "ok"


def test_other_peers_and_dead_ones_are_no_serves() -> None:
    def peer(name: str, state: str) -> Any:  # noqa: ANN401  # as much of a `Peer` as is looked at
        return SimpleNamespace(name=name, state=state, pid=7, alive=state != "dead")

    crowd = [peer("ocgpu-serve", "ungated"), peer("ocgpu-serve", "dead"), peer("train", "running")]

    assert company.judge_peers(crowd)[1] == Finding("serves", "ok", "1 on this GPU")


def test_a_lease_is_free_or_held_and_waited_for_by_name(gpu_key: str) -> None:
    assert lease(gpu_key) == Finding("lease", "ok", "free")

    with holder() as held, remote() as waiter:
        waiter.ask("import threading; wanted = Lease()")
        waiter.ask("threading.Thread(target=wanted.acquire, daemon=True).start()")
        wait_until(lambda: "waiting" in lease(gpu_key).found)

        finding = lease(gpu_key)
    assert finding.status == "ok"
    assert f"held, exclusive, by {PYTHON} (pid {held.pid}, a test)" in finding.found
    assert f"; waiting: {PYTHON} (pid {waiter.pid})" in finding.found


def test_a_holder_that_cannot_be_known_is_said_to_be_so() -> None:
    status: Any = SimpleNamespace(held=True, mode="shared", holders=[], waiters=[])

    (finding,) = company.judge_lease(status)

    assert finding == Finding("lease", "ok", "held, shared, by a process not known")

    status.holders = [SimpleNamespace(pid=None, name=None, reason=None)]
    assert company.judge_lease(status)[0].found == "held, shared, by ? (pid not known)"


def test_a_stopped_holder_is_a_warning(gpu_key: str) -> None:
    with remote() as held:
        held.ask("lease = Lease(); lease.acquire()")
        with held.stopped():
            wait_until(lambda: lease(gpu_key).status == "warning")
            finding = lease(gpu_key)
        wait_until(lambda: lease(gpu_key).status == "ok")

    assert f"pid {held.pid} is stopped" in finding.found
    assert f"`kill -CONT {held.pid}`" in str(finding.remedy)


def test_a_reason_cannot_forge_a_line(gpu_key: str) -> None:
    with Lease(reason="mine\x1b[2J\nok  all is well"):
        finding = lease(gpu_key)

    assert finding.found.isprintable()
    assert "\\x1b[2J" in finding.found


def test_a_lease_file_that_is_none_is_an_error(gpu_dir: Path, gpu_key: str) -> None:
    (gpu_dir / f"ocgpu-{gpu_key}.lease").mkdir()

    assert lease(gpu_key).status == "error"
    assert lease(gpu_key).remedy
