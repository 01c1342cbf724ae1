"""`ocgpu doctor` on the listeners of serve: running, free, or another program's."""

import json
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import ocgpu
from ocgpu.doctor import listeners
from ocgpu.doctor.finding import Finding
from ocgpu.forms import Listen
from tests.fakes import Engines
from tests.one_answer import document, server
from tests.processes import Processes
from tests.server.served import start_serve

HEALTH = {"state": "idle", "llm_inflight": 0, "image_pending": 0, "version": ocgpu.__version__}


def listener(listen: Listen | None) -> Finding:
    (finding,) = listeners.check_listener("LISTEN_ADMIN", listen, listeners.ask_listener(listen))
    return finding


def at(port: int, host: str = "127.0.0.1") -> Listen:
    return Listen(host=host, port=port)


def test_a_listener_that_is_off_or_has_any_port_is_well() -> None:
    assert listener(None).status == "ok"
    assert listener(at(0)).status == "ok"


@pytest.mark.parametrize("host", ["::", "0.0.0.0", "127.0.0.1", "::1"])  # noqa: S104  # asked
def test_a_free_port_is_well(host: str) -> None:
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    with socket.socket(family) as taken:
        taken.bind(("::1" if host == "::1" else "127.0.0.1", 0))  # and does not listen
        finding = listener(at(taken.getsockname()[1], host))

    assert (finding.status, "the port is free" in finding.found) == ("ok", True)


def test_a_running_serve_is_named_with_its_state(
    engines: Engines, processes: Processes, tmp_path: Path
) -> None:
    served = start_serve(processes, engines, tmp_path / "log")

    for url in (served.ollama, served.comfy, served.admin):
        finding = listener(at(urlsplit(url).port or 0))
        assert finding.status == "ok"
        assert f"serve {ocgpu.__version__} runs, idle" in finding.found


def test_another_program_on_the_port_is_an_error(engines: Engines) -> None:
    finding = listener(at(engines.ollama.port))

    assert finding.status == "error"
    assert "it answers 404 to /healthz" in finding.found
    assert "`LISTEN_ADMIN`" in str(finding.remedy)


def test_a_program_that_speaks_no_http_on_the_port_is_an_error() -> None:
    with server(lambda connection: connection.sendall(b"220 mail\r\n")) as port:
        finding = listener(at(port))

    assert (finding.status, "another program has the port" in finding.found) == ("error", True)


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({}, "ok", "runs, idle$"),
        ({"version": "0.0.1"}, "warning", "serve 0.0.1 runs, idle, and this is "),
        ({"draining": True}, "warning", "shutting down"),
        ({"registry": {"enabled": True}}, "ok", "runs, idle$"),
        ({"registry": {"enabled": False, "reason": "no\nGPU"}}, "ok", r"registry: no\\nGPU$"),
        ({"lease": {"enabled": False, "reason": "LEASE"}}, "ok", "without lease: LEASE$"),
        ({"lease": "odd"}, "ok", "runs, idle$"),
    ],
)
def test_what_serve_says_of_itself_is_judged(
    more: dict[str, object], status: str, words: str
) -> None:
    with server(document(json.dumps({**HEALTH, **more}))) as port:
        finding = listener(at(port))

    assert finding.status == status
    assert re.search(words, finding.found), finding.found
