"""What the tests of the proxy may ask for: a real `ocgpu serve` before the fakes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes import Engines
from tests.processes import Processes
from tests.server.served import Served, start_serve


@pytest.fixture
def serve(processes: Processes, engines: Engines, tmp_path: Path) -> Callable[..., Served]:
    """Starts a real `ocgpu serve` before the fakes; keywords are settings."""

    def start(**settings: str) -> Served:
        served = start_serve(processes, engines, tmp_path / "serve.log", settings)
        engines.record.clear()
        return served

    return start


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """A real `ocgpu serve` with default settings."""
    return serve()
