"""Which processes are an engine: who listens, for whom, and what descends from it."""

import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocgpu import lineage
from ocgpu.lineage import is_descendant
from ocgpu.server import engine_processes
from ocgpu.server.engine_processes import (
    EngineFinder,
    listeners,
    listening_pids,
    local_addresses,
)
from tests.server.local_engine import LocalEngine


@pytest.fixture
def local() -> Iterator[LocalEngine]:
    engine = LocalEngine()
    yield engine
    engine.end()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])  # noqa: S104 - the tests' own
def test_who_listens_is_found_with_its_descendants(host: str) -> None:
    if ":" in host and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("no IPv6 on this machine")
    asked = "::1" if host == "::1" else "127.0.0.1"
    engine = LocalEngine(host)
    try:
        roots = listening_pids(local_addresses(asked), engine.port)

        assert roots == {engine.pid}
        assert is_descendant(engine.pid, roots) is True
        assert is_descendant(engine.worker, roots) is True
        assert is_descendant(os.getpid(), roots) is False
        assert is_descendant(2**22 + 5, roots) is None
    finally:
        engine.end()


def test_a_port_of_another_address_is_not_ours(local: LocalEngine) -> None:
    assert listening_pids([ipaddress.ip_address("127.0.0.2")], local.port) == frozenset()


def test_only_a_listener_counts_and_not_who_holds_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "0100007F:2CAA"
    lines = ["sl local rem st", f"0: {place} 0: 01 0 0 0 0 0 5", f"1: {place} 0: 0A 0 0 0 0 0 6"]
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text("\n".join(lines))
    for pid, inode in ((50, 5), (60, 6)):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
    monkeypatch.setattr(engine_processes, "_PROC", tmp_path)

    assert listening_pids(local_addresses("127.0.0.1"), 0x2CAA) == {60}


def test_a_process_with_any_name_has_a_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, stat in ((50, "50 (a) R 9 (b)) S 40 1 1"), (40, "40 (x) S 1 1 1"), (1, "1 (i) S 0 0")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(stat)
    monkeypatch.setattr(lineage, "_PROC", tmp_path)

    assert is_descendant(50, frozenset((40,))) is True
    assert is_descendant(50, frozenset((9,))) is False


@pytest.mark.parametrize(
    ("host", "count"), [("127.0.0.1", 1), ("192.0.2.1", 0), ("no.such.invalid", 0), ("", 0)]
)
def test_only_addresses_of_this_machine_are_local(host: str, count: int) -> None:
    assert len(local_addresses(host)) == count


FORWARDER = """
import socket, sys, time
open("/proc/self/comm", "w").write(sys.argv[1])
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize(("name", "seen"), [("docker-proxy", False), ("ollama", True)])
def test_who_listens_for_a_container_is_not_the_engine(name: str, seen: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FORWARDER, name], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        found = listeners(local_addresses("127.0.0.1"), port)

        assert found.pids == ({process.pid} if seen else frozenset())
        assert found.uids == (frozenset() if seen else {os.getuid()})
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_an_engine_is_found_again_without_a_search_until_it_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches = []
    search = engine_processes._holders

    def counted(sockets: dict[str, int]) -> dict[int, Path]:
        searches.append(sockets)
        return search(sockets)

    monkeypatch.setattr(engine_processes, "_holders", counted)
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        finder = EngineFinder(f"http://127.0.0.1:{port}")
        assert finder.find().pids == {os.getpid()}
        assert finder.find().pids == {os.getpid()}
        assert len(searches) == 1

    assert finder.find().pids == frozenset()
    assert finder.find().pids == frozenset()
    # It is not searched for at every look while it is down.
    assert len(searches) == 2
    monkeypatch.setattr(engine_processes, "_SEARCH_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", port)):
        assert finder.find().pids == {os.getpid()}


def test_an_engine_on_another_machine_is_nobody_here() -> None:
    found = EngineFinder("http://192.0.2.1:11434").find()

    assert found == (frozenset(), frozenset())


def test_a_socket_that_init_handed_over_is_not_init_s(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {1: Path("/proc/1/fd/3"), 50: Path("/proc/50/fd/3")}
    monkeypatch.setattr(engine_processes, "_holders", lambda _: held)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        assert listeners(local_addresses("127.0.0.1"), port).pids == {50}
