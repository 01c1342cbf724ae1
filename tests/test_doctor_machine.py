"""`ocgpu doctor` on clocks, versions and limits."""

import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import ocgpu
from ocgpu.doctor import clock, machine
from ocgpu.doctor.clock import Reading
from tests.remote import remote


def test_the_clocks_of_this_machine_are_read_as_one_moment() -> None:
    before = time.time(), time.monotonic()
    reading = clock.read_clocks()

    assert before[0] <= reading.wall <= time.time()
    assert before[1] <= reading.monotonic <= time.monotonic()


def test_the_pair_that_took_least_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = iter([1000.0, 1001.0, 1002.0, 1003.0])
    monotonic = iter([0.0, 1.0, 2.0, 3.0, 3.5, 4.0, 5.0])
    clocks = SimpleNamespace(time=lambda: next(wall), monotonic=lambda: next(monotonic))
    monkeypatch.setattr(clock, "time", clocks)

    assert clock.read_clocks(attempts=3) == Reading(1002.0, 3.25)


@pytest.mark.parametrize(
    ("step", "status", "words"),
    [
        (0.0, "ok", "no step"),
        (0.001, "ok", "no step"),
        (0.5, "warning", "+0.500 s"),
        (-0.5, "warning", "-0.500 s"),
        (3600.0, "error", "+3600.000 s"),
        (-4.0, "error", "taken for dead"),
    ],
)
def test_a_step_of_the_wall_clock_is_told_by_its_length(
    step: float, status: str, words: str
) -> None:
    (finding,) = clock.check_clock(Reading(1e9, 50.0), Reading(1e9 + 2.0 + step, 52.0))

    assert (finding.status, words in finding.found) == (status, True), finding.found


@pytest.mark.parametrize(
    ("source", "status"), [("tsc", "ok"), ("kvm-clock", "ok"), ("hpet", "warning"), (None, "ok")]
)
def test_a_slow_clock_source_is_a_warning(source: str | None, status: str) -> None:
    assert clock.check_source(source)[0].status == status


def test_the_clock_source_is_read_where_there_is_one(tmp_path: Path) -> None:
    assert clock.current_source(tmp_path / "none") is None
    (tmp_path / "source").write_text("tsc\n")
    assert clock.current_source(tmp_path / "source") == "tsc"
    (tmp_path / "source").write_text("\n")
    assert clock.current_source(tmp_path / "source") is None


def test_the_versions_installed_here_are_well_and_named() -> None:
    (finding,) = machine.check_versions()

    assert finding.status == "ok"
    assert finding.found.startswith(f"ocgpu {ocgpu.__version__}, Python 3.")
    assert f"granian {metadata.version('granian')}" in finding.found


def test_a_package_that_is_missing_is_an_error() -> None:
    def version(name: str) -> str:
        if name in {"granian", "rich"}:
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    (finding,) = machine.check_versions(version)

    assert (finding.status, finding.found) == ("error", "not installed: granian, rich")
    assert finding.remedy == "`pip install granian rich`"


@pytest.mark.parametrize(("package", "status"), [("0.0.1", "warning"), (None, "ok")])
def test_a_core_of_another_version_is_a_warning(package: str | None, status: str) -> None:
    def version(name: str) -> str:
        if name == "ocgpu" and package is None:
            raise metadata.PackageNotFoundError(name)
        return package or "1" if name == "ocgpu" else "1"

    assert machine.check_versions(version)[0].status == status


def test_the_limit_to_which_a_serve_could_raise_its_own_is_read() -> None:
    with remote() as other:
        other.ask("import resource")
        other.ask("resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))")
        other.ask("from ocgpu.doctor import machine")

        assert other.ask("machine.open_files_limit()") == 300


@pytest.mark.parametrize(
    ("limit", "queue", "status"),
    [
        (None, 1024, "ok"),
        (1152, 1024, "ok"),
        (1024, 1024, "warning"),
        (1024, 100, "ok"),
        (255, 1, "error"),
    ],
)
def test_too_few_open_files_for_the_queue_are_told(
    limit: int | None, queue: int, status: str
) -> None:
    (finding,) = machine.check_open_files(limit, queue)

    assert finding.status == status
    assert (finding.remedy is None) == (status == "ok")
