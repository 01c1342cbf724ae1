"""The simulators as processes."""

import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.processes import Processes
from tests.waiting import wait_until

COMMAND = (sys.executable, "-m", "ocgpu.simulators")
PROBES = {"ollama": "/api/version", "comfyui": "/system_stats"}


def start(processes: Processes, engine: str, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    process = processes.start((*COMMAND, engine, "--port", "0"), log=log)
    line = wait_until(lambda: log.read_text().endswith("\n") and log.read_text(), what=str(log))
    assert line.startswith("listening on http://127.0.0.1:")
    return process, line.removeprefix("listening on ").strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("engine", PROBES)
def test_a_simulator_says_where_it_listens_and_ends_cleanly(
    processes: Processes, tmp_path: Path, engine: str, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    process, url = start(processes, engine, log)
    with urlopen(url + PROBES[engine]) as answer:  # noqa: S310 - our own address
        assert answer.status == 200

    process.send_signal(number)

    assert process.wait(timeout=10) == 0
    assert log.read_text().count("\n") == 1


def test_a_taken_port_is_refused_with_the_remedy(processes: Processes, tmp_path: Path) -> None:
    _, url = start(processes, "ollama", tmp_path / "first")
    port = url.rsplit(":", 1)[1]

    second = processes.start((*COMMAND, "comfyui", "--port", port), log=tmp_path / "second")

    assert second.wait(timeout=10) == 1
    assert f"`127.0.0.1:{port}`" in (tmp_path / "second").read_text()
    assert "choose another --port" in (tmp_path / "second").read_text()
