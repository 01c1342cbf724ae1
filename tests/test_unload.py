"""`ocgpu unload` against a real serve, and where there is none."""

import socket
import subprocess
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from ocgpu import Lease
from tests.fakes import Engines
from tests.server.client import background
from tests.server.conftest import serve  # noqa: F401 - a fixture
from tests.server.jobs import chat, open_chat
from tests.server.served import Served

Serve = Callable[..., Served]


def unload(admin: str, *more: str) -> subprocess.CompletedProcess[str]:
    place = urlsplit(admin).netloc
    command = [sys.executable, "-m", "ocgpu", "unload", "--listen-admin", place, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def served(serve: Serve) -> Served:  # noqa: F811 - as pytest has it
    return serve()


def test_it_evicts_what_is_on_the_card_and_says_so(engines: Engines, served: Served) -> None:
    assert chat(served).status == 200

    done = unload(served.admin)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "unloaded: llama3.2:latest\nComfyUI freed its memory\n"
    assert engines.ollama.usage.resident_bytes == 0
    assert served.health()["lease"]["mode"] is None
    assert unload(served.admin).stdout.startswith("unloaded: no model was loaded\n")


def test_a_refusal_is_said_and_is_a_failure(engines: Engines, serve: Serve) -> None:  # noqa: F811
    served = serve(UNLOAD_TIMEOUT="300ms")
    token = engines.ollama.hold_token(1)
    with open_chat(served) as opened:
        opened.line()

        done = unload(served.admin)

        assert done.returncode == 1
        assert done.stderr == "ocgpu: not unloaded: the gpu was not free within 0.3s\n"
        token.open()


def test_where_nothing_answers_the_remedy_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        done = unload(f"http://127.0.0.1:{port}")

    assert done.returncode == 1
    assert done.stderr.startswith(
        f"ocgpu: no serve answers at 127.0.0.1:{port}: connection refused"
    )
    assert "LISTEN_ADMIN" in done.stderr


def test_it_waits_for_no_request_that_itself_waits_for_somebody_outside(
    engines: Engines, served: Served, gpu_key: str
) -> None:
    with Lease(gpu_key) as lease:
        waiting = background(lambda: chat(served))
        served.wait_waiting("llm", 1)

        assert unload(served.admin).returncode == 0

        lease.release()
        assert waiting.result().status == 200
