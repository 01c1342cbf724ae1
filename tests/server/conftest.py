"""What the tests of the proxy may ask for: a real `ocgpu serve` before the fakes."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.fakes import Engines
from tests.processes import Processes
from tests.server.inloop import RawUpstream
from tests.server.script import Bench, Script
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


@pytest.fixture
def script() -> Script:
    """Both engines, played by hand."""
    return Script()


@pytest.fixture
async def make(script: Script) -> AsyncIterator[Callable[..., Bench]]:
    """Wires the parts of an image job to `script`; keywords are settings."""
    benches: list[Bench] = []
    async with RawUpstream(script) as raw:

        def build(*, batch: int = 8, **settings: object) -> Bench:
            benches.append(Bench(script, raw.url, batch, **settings))
            return benches[-1]

        yield build
        for bench in benches:
            await bench.jobs.close()
            await bench.upstream.close()
