"""What `Pacer` and `peers` refuse, and what they do where nothing can be shared."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ocgpu
from ocgpu import ConfigError, NoGpuError, Pacer, RegistryUnavailableError
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("gpu_dir", "gpu_key")


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, 1001.0, 0.0009])
def test_an_illegal_weight_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"invalid `weight`: .*; use a number from 0.001 to 1000"):
        Pacer(weight)
    with Pacer() as pacer, pytest.raises(ConfigError, match="invalid `weight`"):
        pacer.weight = weight


@pytest.mark.parametrize("key", ["", "../x", "a b", "k" * 65, "é"])
def test_an_illegal_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="invalid `gpu`"):
        Pacer(gpu=key)
    with pytest.raises(ConfigError, match="invalid `gpu`"):
        ocgpu.peers(key)


@pytest.mark.parametrize("schedule", ["turns", "", "GRID"])
def test_an_unknown_schedule_is_refused(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="invalid `schedule`"):
        Pacer(schedule=schedule)
    monkeypatch.setenv("OCGPU_SCHEDULE", schedule or "x")
    with pytest.raises(ConfigError, match="invalid `OCGPU_SCHEDULE`"):
        Pacer()


@pytest.mark.parametrize(("name", "value"), [("OCGPU_DIR", "relative"), ("OCGPU_SHARE", "all")])
def test_an_illegal_variable_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match=f"invalid `{name}`: {value}"):
        Pacer()


def test_without_a_gpu_a_pacer_registers_nothing(
    monkeypatch: pytest.MonkeyPatch, gpu_dir: Path
) -> None:
    monkeypatch.delenv("OCGPU_GPU_KEY")
    monkeypatch.setattr("ocgpu.pacer.resolve_key", _no_gpu)

    pacer = Pacer()

    assert (pacer.enabled, pacer.reason, pacer.step()) == (False, "no GPU here", 0.0)
    assert pacer.snapshot().to_dict()["gpu_key"] is None
    assert list(gpu_dir.iterdir()) == []
    with pytest.raises(NoGpuError):
        Pacer(strict=True)


def test_an_unusable_directory_disables_the_pacer_and_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("OCGPU_DIR", str(tmp_path / "absent"))

    pacer = Pacer()

    assert not pacer.enabled
    assert "OCGPU_DIR" in str(pacer.reason)
    assert pacer.step() == 0.0
    assert len(caplog.records) == 1
    with pytest.raises(RegistryUnavailableError, match="OCGPU_DIR"):
        Pacer(strict=True)


def test_a_look_at_a_directory_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OCGPU_DIR", str(tmp_path / "absent"))

    with pytest.raises(RegistryUnavailableError, match="OCGPU_DIR"):
        ocgpu.peers()


@pytest.mark.parametrize(
    "content", [b"x", b"\xff" * 4096, b"OCGPU\0\0\0\x02\0\0\0\x10\0\0\0" + bytes(4080)]
)
def test_foreign_bytes_behind_the_name_are_refused_and_left_alone(
    gpu_dir: Path, gpu_key: str, content: bytes
) -> None:
    file = gpu_dir / f"opencoti-gpu-{gpu_key}"
    file.write_bytes(content)

    with pytest.raises(RegistryUnavailableError):
        Pacer(strict=True)

    assert file.read_bytes() == content


def test_a_symbolic_link_behind_the_name_is_refused(gpu_dir: Path) -> None:
    with Pacer():
        pass
    segment = next(gpu_dir.glob("*.sem"))
    segment.unlink()
    segment.symlink_to(gpu_dir / "elsewhere")

    with pytest.raises(RegistryUnavailableError, match="symbolic link"):
        Pacer(strict=True)

    assert not (gpu_dir / "elsewhere").exists()


def test_an_unlinked_segment_heals_within_a_few_beats(gpu_dir: Path) -> None:
    with Pacer(name="a") as a, Pacer(name="b") as b:
        for file in gpu_dir.iterdir():
            file.unlink()

        wait_until(lambda: {peer.name for peer in ocgpu.peers().peers} == {"a", "b"}, 10)
        wait_until(lambda: a.enabled and b.enabled, 10)
        assert [peer.name for peer in a.snapshot().peers] == ["b"]


def test_a_private_registry_has_mode_0600(monkeypatch: pytest.MonkeyPatch, gpu_dir: Path) -> None:
    monkeypatch.setenv("OCGPU_SHARE", "user")
    with Pacer():
        modes = {file.stat().st_mode & 0o777 for file in gpu_dir.iterdir()}

    assert modes == {0o600}


def test_an_ungated_process_is_seen_at_work_until_it_says_otherwise() -> None:
    with Pacer() as pacer, Pacer(name="serve", _gated=False) as serve:
        serve._mark(active=True)
        serve._mark(active=True)
        states = [peer.state for peer in pacer.snapshot().peers]
        serve._mark(active=False)

        assert (states, [peer.state for peer in pacer.snapshot().peers]) == (["ungated"], ["idle"])


def test_a_machine_wide_registry_is_open_to_all_whatever_the_umask(gpu_dir: Path) -> None:
    before = os.umask(0o077)
    try:
        with Pacer():
            modes = {file.stat().st_mode & 0o777 for file in gpu_dir.iterdir()}
    finally:
        os.umask(before)

    assert modes == {0o666}


def test_an_idle_process_survives_that_its_segment_is_cut(gpu_dir: Path) -> None:
    program = "import ocgpu, sys\np = ocgpu.Pacer()\nprint(p.slot, flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"

        segment = next(gpu_dir.glob("*.sem"))
        os.truncate(segment, 0)

        # Not by a look of ours, which would mend the file itself.
        wait_until(lambda: segment.stat().st_size == 4096, 10)
        wait_until(lambda: [peer.pid for peer in ocgpu.peers().peers] == [process.pid], 10)
        _, _ = process.communicate("")
        assert process.returncode == 0


@pytest.mark.parametrize("name", ["name", "gpu", "schedule"])
def test_a_text_with_half_a_letter_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"invalid `{name}`: .*udcff"):
        Pacer(**{name: "\udcff"})


@pytest.mark.parametrize("argv", [["caf\udce9.py"], [None], [], None])
def test_whatever_the_program_is_called_a_pacer_joins(
    monkeypatch: pytest.MonkeyPatch, argv: list[str] | None
) -> None:
    if argv is None:
        monkeypatch.delattr(sys, "argv")
    else:
        monkeypatch.setattr(sys, "argv", argv)

    with Pacer() as pacer:
        assert pacer.enabled
        assert [peer.name for peer in ocgpu.peers().peers] != [""]


def test_an_attribute_that_is_none_is_not_swallowed() -> None:
    with Pacer() as pacer:
        with pytest.raises(AttributeError):
            pacer.wieght = 2.0  # type: ignore[attr-defined]
        with pytest.raises(AttributeError):
            pacer.name = "chat"  # type: ignore[attr-defined]


def test_pace_refuses_what_is_no_iterable_at_once() -> None:
    with (
        Pacer() as pacer,
        pytest.raises(TypeError, match="invalid `items`: `int`; use an iterable"),
    ):
        pacer.pace(5)  # type: ignore[arg-type]


def _no_gpu(_gpu: object) -> str:
    raise NoGpuError("no GPU here")
