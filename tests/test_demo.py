"""`ocgpu demo` as a new user runs it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.contended, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "ocgpu", "demo"],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


def lines_of(output: str) -> list[str]:
    """What was said, without the times."""
    return [re.sub(r"^\s*[\d.]+ s\s+", "", line).strip() for line in output.splitlines()]


def position(lines: list[str], pattern: str) -> int:
    return next(at for at, line in enumerate(lines) if re.match(pattern, line))


def test_the_demo_shows_the_split_and_the_lock_and_leaves_nothing(
    demo: subprocess.Popen[str], tmp_path: Path
) -> None:
    output, errors = demo.communicate(timeout=120)

    assert (demo.returncode, errors) == (0, "")
    lines = lines_of(output)
    measured = re.search(r"measured ([\d.]+)% : ([\d.]+)%", output)
    assert measured is not None
    assert float(measured[1]) / float(measured[2]) == pytest.approx(2.0, rel=0.2)
    order = [
        position(lines, r"chat 1 +first token"),
        position(lines, r"chat 1 +done"),
        position(lines, r"image +accepted"),
        position(lines, r"image +rendered"),
        position(lines, r"proxy +told ComfyUI to free its memory"),
        position(lines, r"chat 2 +first token"),
        position(lines, r"lock +llm → idle"),
        position(lines, r"card +both engines computed at once: never"),
        position(lines, r"try within .* curl http://127.0.0.1:\d+/healthz"),
    ]
    assert order == sorted(order)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_with_0_and_leaves_nothing(
    demo: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    assert demo.stdout is not None
    for line in demo.stdout:
        if "alone" in line:
            break
    children = psutil.Process(demo.pid).children(recursive=True)
    assert children

    demo.send_signal(number)
    _, errors = demo.communicate(timeout=30)

    assert (demo.returncode, errors) == (0, "")
    assert not [child for child in children if child.is_running()]
    assert list(tmp_path.iterdir()) == []
