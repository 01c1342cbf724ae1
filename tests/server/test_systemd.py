"""Socket activation and readiness, with a small parent that does what systemd does."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes import Engines
from tests.processes import Processes
from tests.server.client import OpenCall, call
from tests.server.inloop import RawUpstream, exchange, proxy
from tests.server.requests import CHAT, Engine, get, status_of, waiting
from tests.server.served import Served, serve_environ

HERE = "127.0.0.1"
# Puts the descriptors where systemd puts them and says whose they are; the rest is the command.
ACTIVATE = """
import os, sys
given = [int(text) for text in sys.argv[1].split(",")]
for place, descriptor in enumerate(given):
    os.dup2(descriptor, 100 + place, inheritable=False)
for place in range(len(given)):
    os.dup2(100 + place, 3 + place)
os.environ.setdefault("LISTEN_PID", str(os.getpid()))
os.environ.setdefault("LISTEN_FDS", str(len(given)))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
# What a start makes of them, without the rest of a start.
LOOK = """
import json, os, sys
from ocgpu.server.systemd import InheritError, inherited_sockets
try:
    taken = inherited_sockets(os.environ)
    names = [[one.name, one.socket.getsockname()[1]] for one in taken]
    kept = [one.name for one in taken if one.socket.get_inheritable()]
except InheritError as error:
    names, kept = str(error), []
print(json.dumps([names, kept, [name for name in os.environ if name.startswith("LISTEN_")]]))
"""


def look(*given: int, **environ: str) -> tuple[object, list[str], list[str]]:
    """What a process makes of descriptors that it was passed, and what it leaves of the rest."""
    numbers = ",".join(map(str, given))
    done = subprocess.run(
        [sys.executable, "-c", ACTIVATE, numbers, "-c", LOOK],
        env={**os.environ, **environ},
        pass_fds=given,
        capture_output=True,
        text=True,
        timeout=25,
        check=True,
    )
    names, kept, left = json.loads(done.stdout)
    return names, kept, left


@pytest.fixture
def listening() -> Iterator[Callable[[], socket.socket]]:
    """Makes sockets that listen."""
    made: list[socket.socket] = []

    def make() -> socket.socket:
        made.append(socket.create_server((HERE, 0)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def test_passed_sockets_are_taken_with_their_names_and_nothing_is_left_for_children(
    listening: Callable[[], socket.socket],
) -> None:
    one, other = listening(), listening()

    names, kept, left = look(one.fileno(), other.fileno(), LISTEN_FDNAMES="ollama:ocgpu.socket")

    assert names == [["ollama", port_of(one)], ["ocgpu.socket", port_of(other)]]
    assert kept == []
    assert left == []


def test_sockets_of_another_process_are_left_alone(
    listening: Callable[[], socket.socket],
) -> None:
    assert look(listening().fileno(), LISTEN_PID="1") == ([], [], [])


@pytest.mark.parametrize("wrong", [{"LISTEN_FDS": "two"}, {"LISTEN_FDS": "-1"}, {"LISTEN_PID": ""}])
def test_variables_that_make_no_sense_are_refused(
    listening: Callable[[], socket.socket], wrong: dict[str, str]
) -> None:
    names, _, left = look(listening().fileno(), **wrong)

    assert str(names).startswith("invalid `LISTEN_FDS`: ")
    assert left == []


def no_socket() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def datagram() -> int:
    return bound(socket.AF_INET, socket.SOCK_DGRAM).detach()


def local() -> int:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen()
    return listener.detach()


def not_listening() -> int:
    return bound(socket.AF_INET, socket.SOCK_STREAM).detach()


def shared() -> int:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((HERE, 0))
    listener.listen()
    return listener.detach()


def bound(family: int, kind: int) -> socket.socket:
    made = socket.socket(family, kind)
    made.bind((HERE, 0))
    return made


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (no_socket, "no socket"),
        (datagram, "not for TCP"),
        (local, "not for TCP"),
        (not_listening, "not listening"),
        (shared, "shared by `ReusePort=`"),
    ],
)
def test_what_is_no_listener_is_refused_with_its_number_and_name(
    listening: Callable[[], socket.socket], make: Callable[[], int], reason: str
) -> None:
    descriptor = make()
    try:
        names, _, left = look(listening().fileno(), descriptor, LISTEN_FDNAMES="ollama:comfy")
    finally:
        os.close(descriptor)

    assert f"inherited descriptor 4 (`comfy`): {reason}" in str(names)
    assert left == []


def test_a_descriptor_that_is_not_there_is_refused(
    listening: Callable[[], socket.socket],
) -> None:
    names, _, _ = look(listening().fileno(), LISTEN_FDS="98")

    assert "(`unknown`): not open; give it with `ListenStream=`" in str(names)


def activate(
    processes: Processes, log: Path, environ: dict[str, str], *given: socket.socket
) -> "subprocess.Popen[bytes]":
    numbers = [listener.fileno() for listener in given]
    command = [sys.executable, "-c", ACTIVATE, ",".join(map(str, numbers)), "-m", "ocgpu", "serve"]
    return processes.start(command, log=log, environ=environ, descriptors=numbers)


def test_it_serves_on_inherited_sockets_and_loses_no_client_in_a_restart(
    processes: Processes,
    engines: Engines,
    tmp_path: Path,
    listening: Callable[[], socket.socket],
) -> None:
    ollama, comfy = listening(), listening()
    # One is known by its name, one by the port that is set for it, one is bound as ever.
    names = {"LISTEN_FDNAMES": "ollama:ocgpu.socket"}
    environ = {
        **serve_environ(engines),
        **names,
        "LISTEN_OLLAMA": "127.0.0.1:9",
        "LISTEN_COMFY": f"{HERE}:{port_of(comfy)}",
    }
    first = Served(activate(processes, tmp_path / "1", environ, ollama, comfy), tmp_path / "1")

    assert first.ollama == f"http://{HERE}:{port_of(ollama)}"
    assert first.comfy == f"http://{HERE}:{port_of(comfy)}"
    assert call("GET", f"{first.comfy}/healthz").status == 200
    assert first.stop() == 0

    with OpenCall("GET", f"{first.ollama}/healthz") as between:
        second = Served(activate(processes, tmp_path / "2", environ, ollama, comfy), tmp_path / "2")

        assert between.answer().status == 200
    assert second.stop() == 0


def test_a_start_with_a_wrong_descriptor_ends_with_1(
    processes: Processes, engines: Engines, tmp_path: Path
) -> None:
    with bound(socket.AF_INET, socket.SOCK_STREAM) as wrong:
        process = activate(processes, tmp_path / "log", serve_environ(engines), wrong)

        assert process.wait(timeout=25) == 1
    assert "inherited descriptor 3 (`unknown`): not listening" in (tmp_path / "log").read_text()


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
@pytest.mark.parametrize("abstract", [False, True])
async def test_the_service_manager_is_told_ready_and_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, abstract: bool
) -> None:
    name = f"@ocgpu-{os.getpid()}-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    engine, stop = Engine(), asyncio.Event()
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0", 1))
        manager.settimeout(0)
        async with (
            asyncio.timeout(20),
            RawUpstream(engine) as raw,
            proxy(raw.url, raw.url, stop, drain_timeout=8.0) as bound_at,
        ):
            assert b"READY=1" in (await loop.sock_recv(manager, 1000)).splitlines()
            assert status_of(await exchange(bound_at.comfy_url, get("/healthz"))) == 200
            assert "NOTIFY_SOCKET" not in os.environ, "no child may speak for us"
            chat = asyncio.ensure_future(exchange(bound_at.ollama_url, CHAT))
            await waiting(bound_at.ollama_url, llm_inflight=1)
            stop.set()

            lines = (await loop.sock_recv(manager, 1000)).splitlines()
            assert b"STOPPING=1" in lines
            assert b"EXTEND_TIMEOUT_USEC=38000000" in lines
            assert not chat.done()
            engine.go_on.set()
            await chat
        with pytest.raises(BlockingIOError):
            manager.recv(1)


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
@pytest.mark.parametrize("name", ["/nowhere/notify", "vsock:2:1", "@" + 200 * "x"])
async def test_a_service_manager_that_does_not_listen_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", name)

    async with RawUpstream(Engine()) as raw, proxy(raw.url, raw.url) as bound_at:
        assert status_of(await exchange(bound_at.ollama_url, get("/healthz"))) == 200

    assert "cannot tell the service manager" in caplog.text
