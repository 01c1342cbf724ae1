import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from urllib.request import urlopen

import pytest

import ocgpu
from ocgpu.cli import main, make_parser
from ocgpu.errors import ConfigError, LeaseBusyError, LeaseTimeoutError, NoGpuError
from ocgpu.settings import Settings, describe
from tests.processes import Processes
from tests.waiting import wait_until

HELP = Path(__file__).parent / "data" / "help"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name, _ in describe(Settings())] + ["FORCE_COLOR", "TTY_COMPATIBLE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def words(text: str) -> str:
    """Text without its line breaks: versions of Python wrap usage lines differently."""
    return " ".join(text.split())


@pytest.mark.parametrize(
    "command", ["", "serve", "demo", "peers", "run", "lease", "check", "doctor"]
)
def test_help_is_the_saved_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Made by `COLUMNS=80 NO_COLOR=1 ocgpu COMMAND --help >tests/data/help/COMMAND.txt`."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"] if command else ["--help"])

    assert caught.value.code == 0
    saved = (HELP / f"{command or 'ocgpu'}.txt").read_text(encoding="utf-8")
    assert words(capsys.readouterr().out) == words(saved)


def test_help_names_the_true_defaults_of_serve() -> None:
    saved = words((HELP / "serve.txt").read_text(encoding="utf-8"))

    for name, text in list(describe(Settings()))[:5]:
        assert f"{name} (default: {text})" in saved
    assert f"(default: {Settings().gpu_share_weight})" in saved


def test_every_command_has_a_saved_help_and_takes_a_gpu() -> None:
    listed = re.findall(r"^    ([a-z]+) ", make_parser().format_help(), re.MULTILINE)

    assert sorted(path.stem for path in HELP.iterdir()) == sorted([*listed, "ocgpu"])
    for path in HELP.iterdir():
        assert path.stem == "ocgpu" or "--gpu GPU" in path.read_text(encoding="utf-8")


def test_help_loads_nothing_that_a_command_needs() -> None:
    code = """
import sys
from ocgpu.cli import main
try:
    main(["--help"])
except SystemExit:
    heavy = {"msgspec", "litestar", "granian", "aiohttp", "rich", "pynvml", "uvloop"}
    print("loaded:", *sorted(heavy & sys.modules.keys()))
"""

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "loaded:"


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])

    assert caught.value.code == 0
    assert capsys.readouterr().out == f"ocgpu {ocgpu.__version__}\n"


def test_module_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "ocgpu", "--version"]

    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout == f"ocgpu {ocgpu.__version__}\n"


def test_no_command_is_a_usage_error_that_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "serve" in captured.err


@pytest.mark.parametrize(
    "argv", [["unknown"], ["peers", "--gpu"], ["serve", "--port", "1"], ["run"], ["lease", "extra"]]
)
def test_illegal_arguments_are_a_usage_error(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)

    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ocgpu")


@pytest.mark.parametrize("argv", [["peers"], ["lease"], ["serve"], ["check"]])
def test_an_illegal_gpu_is_a_usage_error(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--gpu", "a/b"]) == 2

    assert capsys.readouterr().err.startswith("ocgpu: invalid `gpu`: a/b; use 1 to 64 of ")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("first\nsecond"), 2),
        (NoGpuError("first\nsecond"), 1),
        (LeaseBusyError("first\nsecond"), 75),
        (LeaseTimeoutError("first\nsecond"), 75),
    ],
)
def test_an_error_is_lines_on_stderr_and_a_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
) -> None:
    def peers(gpu: object = None) -> None:
        raise error

    monkeypatch.setattr(ocgpu, "peers", peers)

    assert main(["peers", "--gpu", "card"]) == status
    assert capsys.readouterr().err == "ocgpu: first\nocgpu: second\n"


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def peers(gpu: object = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ocgpu, "peers", peers)

    assert main(["peers", "--gpu", "card"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_went_away_is_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ocgpu", "check"],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write_end)

    assert (done.returncode, done.stderr) == (1, "")


def test_check_prints_every_setting_and_masks_the_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "ocgpu.toml"
    config.write_text('job_timeout = "90s"\nmax_queue = 3\n')
    monkeypatch.setenv("ADMIN_TOKEN", "s3cret")
    monkeypatch.setenv("MAX_QUEUE", "4")

    assert main(["check", "--config", str(config), "--comfy-url", "", "--gpu", "card"]) == 0

    lines = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == [name for name, _ in describe(Settings())]
    assert (lines["JOB_TIMEOUT"], lines["MAX_QUEUE"]) == ("1m30s", "4")
    assert (lines["COMFY_URL"], lines["LISTEN_COMFY"]) == ("", "off")
    assert (lines["OCGPU_GPU_KEY"], lines["ADMIN_TOKEN"]) == ("card", "***")


def test_check_names_every_problem_on_a_line_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JOB_TIMEOUT", "15")
    monkeypatch.setenv("LISTEN_OLAMA", ":1")

    assert main(["check", "--ollama-url", "gpu.lan"]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line[:34] for line in captured.err.splitlines()] == [
        "ocgpu: warning: unknown `LISTEN_OL",
        "ocgpu: invalid `JOB_TIMEOUT`: 15; ",
        "ocgpu: invalid `OLLAMA_URL`: gpu.l",
    ]


def test_serve_runs_by_flags_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    module = ModuleType("ocgpu.server.serve")
    module.run = lambda settings: seen.append(settings) or 7  # type: ignore[attr-defined,func-returns-value]
    monkeypatch.setitem(sys.modules, "ocgpu.server.serve", module)
    monkeypatch.setenv("GPU_SHARE_WEIGHT", "3")
    monkeypatch.setenv("OLLAMA_URL", "http://elsewhere")
    flags = ["--gpu-share-weight", "0.5", "--listen-ollama", "127.0.0.1:0", "--gpu", "card"]
    flags += ["--listen-comfy", "127.0.0.1:0", "--listen-admin", "off", "--comfy-url", "http://c"]

    assert main(["serve", *flags]) == 7

    (settings,) = seen
    assert settings.gpu_share_weight == 0.5
    assert settings.ollama_url == "http://elsewhere"
    assert settings.comfy_url == "http://c"
    assert settings.listen_admin is None
    assert settings.gpu_key == "card"


def test_serve_listens_by_its_flags_and_ends_on_sigterm(
    processes: Processes, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    flags = ["--listen-ollama", "127.0.0.1:0", "--listen-admin", "127.0.0.1:0", "--comfy-url", ""]
    command = [sys.executable, "-m", "ocgpu", "serve", *flags, "--ollama-url", "http://127.0.0.1:9"]
    server = processes.start(command, log=log)

    wait_until(lambda: "listener=admin url=http://127.0.0.1:" in log.read_text(), what="listeners")
    (url,) = re.findall(r"listener=ollama url=(http://127\.0\.0\.1:[0-9]+)", log.read_text())
    with urlopen(f"{url}/healthz", timeout=10) as response:  # noqa: S310
        state = json.load(response)["state"]
    server.terminate()

    assert server.wait(timeout=10) == 0
    assert state == "idle"
    assert "comfyui: http" not in log.read_text()


def test_a_closed_standard_output_is_no_traceback() -> None:
    command = f'"{sys.executable}" -m ocgpu check >&-'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=20)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_behind_the_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ocgpu", "check"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=20,
        )

    assert done.returncode == 1
    assert done.stderr == "ocgpu: cannot write the output: No space left on device\n"
