"""What every test may ask for: a place of its own, a key of its own, processes that end with it."""

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import Engines
from tests.fakes.nvml_stub import Driver, compile_stub
from tests.processes import Processes
from tests.seed_peer import SeedPrograms, compile_seed


@pytest.fixture
def gpu_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `OCGPU_DIR` of this test's own, for this process and its children."""
    path = tmp_path / "ocgpu"
    path.mkdir()
    monkeypatch.setenv("OCGPU_DIR", str(path))
    return path


@pytest.fixture
def gpu_key(monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU key that nobody else uses, for this process and its children."""
    key = f"test-{uuid.uuid4().hex[:16]}"
    monkeypatch.setenv("OCGPU_GPU_KEY", key)
    return key


@pytest.fixture
def shared_dir(gpu_key: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory as `/dev/shm` is: everybody may write there, and delete only what is theirs."""
    path = Path(tempfile.mkdtemp(prefix=gpu_key))
    path.chmod(0o1777)
    monkeypatch.setenv("OCGPU_DIR", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def processes(gpu_dir: Path, gpu_key: str) -> Iterator[Processes]:
    """Starts children in this test's own place; none of them outlives the test."""
    started = Processes({"OCGPU_DIR": str(gpu_dir), "OCGPU_GPU_KEY": gpu_key})
    yield started
    started.end_all()


@pytest.fixture
def engines() -> Iterator[Engines]:
    """A fake Ollama and a fake ComfyUI that share one record and one oracle."""
    with Engines() as started:
        yield started


@pytest.fixture(scope="session")
def seed_programs(tmp_path_factory: pytest.TempPathFactory) -> SeedPrograms:
    """The seed's peer, compiled: as a program, and as a library."""
    return compile_seed(tmp_path_factory.mktemp("seed"))


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a stand-in for the driver's library, compiled."""
    return compile_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(nvml_library: Path, tmp_path: Path) -> Driver:
    """What the driver's library says to processes that are started with its `environ`."""
    return Driver(nvml_library, tmp_path / "nvml.txt")
