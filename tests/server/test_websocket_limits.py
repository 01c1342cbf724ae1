"""Websockets through a real `ocgpu serve`: sizes, stalled sides, memory and descriptors."""

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.fakes import Engines
from tests.processes import Processes
from tests.server.client import background
from tests.server.jobs import chat, post_image
from tests.server.served import COMMAND, Served, serve_environ
from tests.server.stalling import SlowUpstream, fill, shake_hands, take
from tests.server.websocket_peers import BINARY, frame
from tests.waiting import wait_until

MIB = 2**20
Start = Callable[[str], Served]


@pytest.fixture
def start(processes: Processes, engines: Engines, tmp_path: Path) -> Start:
    """Starts a real `ocgpu serve` with a ComfyUI at another address than the fake's."""

    def run(comfy_url: str) -> Served:
        log = tmp_path / "serve.log"
        environ = {**serve_environ(engines), "COMFY_URL": comfy_url}
        return Served(processes.start(COMMAND, log=log, environ=environ), log)

    return run


def memory(served: Served) -> int:
    """Bytes that it holds now."""
    size: int = psutil.Process(served.process.pid).memory_info().rss
    return size


def open_socket(served: Served, path: str = "/ws?clientId=me") -> ClientConnection:
    return connect(f"{served.comfy.replace('http', 'ws')}{path}", max_size=None)


@pytest.mark.parametrize("path", ["/ws", "/api/ws"])
def test_open_websockets_are_no_work(engines: Engines, served: Served, path: str) -> None:
    with open_socket(served, f"{path}?clientId=watcher") as socket:
        assert "watcher" in str(socket.recv(timeout=10))
        served.wait_state("idle", llm_inflight=0, image_pending=0)

        assert chat(served).status == 200
        assert post_image(served).status == 200
        served.wait_state("idle")

        socket.ping().wait(10)
    served.wait_state("idle")


def test_a_preview_of_64_mib_arrives_in_one_piece(engines: Engines, served: Served) -> None:
    image = secrets.token_bytes(64 * MIB)
    with open_socket(served) as socket:
        socket.recv(timeout=10)
        engines.run(engines.comfy.preview(image, "me"))

        assert socket.recv(timeout=20) == bytes((0, 0, 0, 1, 0, 0, 0, 1)) + image


def test_a_frame_of_16_mib_passes_upwards_and_a_larger_one_ends_the_websocket(
    start: Start,
) -> None:
    with SlowUpstream() as slow:
        served = start(slow.url)
        with open_socket(served) as socket, slow.accepted() as upstream:
            sending = background(lambda: socket.send(bytes(16 * MIB)))
            assert take(upstream, 16 * MIB + 14) == 16 * MIB + 14
            sending.result(10)

            sending = background(lambda: socket.send(bytes(16 * MIB + 1)))
            # Granian's limit; a close frame and then the end.
            assert take(upstream, 100) == 6
            upstream.close()
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=20)
            # The close frame is lost where the kernel resets a connection with unread bytes.
            assert closed.value.rcvd is None or closed.value.rcvd.code == 1009
            with contextlib.suppress(ConnectionClosed):
                sending.result(20)


def test_a_client_that_takes_nothing_holds_the_upstream_back(start: Start) -> None:
    with SlowUpstream() as slow:
        served = start(slow.url)
        with shake_hands(served.comfy) as client, slow.accepted() as upstream:
            before = memory(served)
            preview = frame(BINARY, bytes(256 * 1024))

            sent = fill(upstream, preview)

            assert sent < 40 * MIB
            assert memory(served) - before < 16 * MIB
            rest = preview[sent % len(preview) :] if sent % len(preview) else b""
            sending = background(lambda: upstream.sendall(rest))
            assert take(client, sent + len(rest)) == sent + len(rest)
            sending.result(10)


def test_an_upstream_that_takes_nothing_holds_the_client_back(start: Start) -> None:
    with SlowUpstream() as slow:
        served = start(slow.url)
        with shake_hands(served.comfy) as client, slow.accepted() as upstream:
            before = memory(served)
            image = frame(BINARY, bytes(256 * 1024), masked=True)

            sent = fill(client, image)

            assert sent < 40 * MIB
            assert memory(served) - before < 16 * MIB
            rest = image[sent % len(image) :] if sent % len(image) else b""
            sending = background(lambda: client.sendall(rest))
            assert take(upstream, sent + len(rest)) == sent + len(rest)
            sending.result(10)


@pytest.mark.parametrize("more", [0, 3])
def test_a_client_that_leaves_a_stalled_upstream_is_noticed(start: Start, more: int) -> None:
    with SlowUpstream() as slow:
        served = start(slow.url)
        with shake_hands(served.comfy) as client, slow.accepted() as upstream:
            # More than both kernels hold: it waits in serve for the upstream to take it.
            image = frame(BINARY, bytes(15 * MIB), masked=True)
            client.sendall(image)
            client.sendall(frame(BINARY, b"more", masked=True) * more)
            client.close()

            wait_until(lambda: _ended(served, upstream), 20, "the upstream's socket cut")


def _ended(served: Served, upstream: object) -> bool:
    """Whether serve has no connection to this upstream any more."""
    port = upstream.getsockname()[1]  # type: ignore[attr-defined]
    connections = psutil.Process(served.process.pid).net_connections("tcp")
    return not [c for c in connections if c.raddr and c.raddr.port == port]


def test_many_websockets_leave_nothing_behind(engines: Engines, served: Served) -> None:
    process = psutil.Process(served.process.pid)

    def churn(number: int) -> None:
        for _ in range(number):
            with open_socket(served) as socket:
                socket.recv(timeout=10)
                engines.run(engines.comfy.preview(b"x" * 1000, "me"))
                socket.recv(timeout=10)
                socket.send("done")

    churn(30)
    descriptors, before = process.num_fds(), memory(served)
    churn(150)

    wait_until(lambda: process.num_fds() <= descriptors, what="descriptors given back")
    assert memory(served) - before < 4 * MIB


def test_an_upstream_that_vanishes_would_be_noticed_by_the_kernel(start: Start) -> None:
    with SlowUpstream() as slow:
        served = start(slow.url)
        with shake_hands(served.comfy), slow.accepted() as upstream:
            port = upstream.getsockname()[1]
            rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
            ours = [row.split() for row in rows if row.split()[2].endswith(f":{port:04X}")]

    # Column `tr`: 02 is the timer of keep-alive (Documentation/networking/proc_net_tcp.rst).
    assert [row[5][:2] for row in ours if row[3] == "01"] == ["02"]
