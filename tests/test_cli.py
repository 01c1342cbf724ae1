import json
import os
import subprocess
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace

import pytest

import ocgpu
from ocgpu.cli import main
from ocgpu.errors import ConfigError, LeaseBusyError, LeaseTimeoutError, NoGpuError
from ocgpu.settings import Settings, describe
from tests.processes import Processes

HELP = Path(__file__).parent / "data" / "help"
HOSTILE = "[red]x[/]\x1b[2J\nroot"
PEERS = [
    SimpleNamespace(
        pid=4711,
        name="chat",
        weight=2.0,
        share=2 / 3,
        busy=0.31,
        state="running",
        heartbeat_age_ms=212,
        slot=0,
    ),
    SimpleNamespace(
        pid=12,
        name=HOSTILE,
        weight=1.5,
        share=1 / 3,
        busy=0.0,
        state="idle",
        heartbeat_age_ms=3,
        slot=15,
    ),
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name, _ in describe(Settings())] + ["FORCE_COLOR", "TTY_COMPATIBLE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What `ocgpu.peers` answers; `asked` is the GPU that it was asked about."""
    state = SimpleNamespace(peers=PEERS, asked=None)

    def peers(gpu: object = None) -> SimpleNamespace:
        state.asked = gpu
        text = json.dumps({"gpu_key": gpu, "self": None, "peers": []})
        return SimpleNamespace(
            gpu_key=gpu, schedule="grid", peers=state.peers, to_json=lambda: text
        )

    monkeypatch.setattr(ocgpu, "peers", peers)
    return state


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def words(text: str) -> str:
    """Text without its line breaks: versions of Python wrap usage lines differently."""
    return " ".join(text.split())


@pytest.mark.parametrize("command", ["", "peers", "check"])
def test_help_is_the_saved_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Made by `COLUMNS=80 NO_COLOR=1 ocgpu COMMAND --help >tests/data/help/COMMAND.txt`."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"] if command else ["--help"])

    assert caught.value.code == 0
    saved = (HELP / f"{command or 'ocgpu'}.txt").read_text(encoding="utf-8")
    assert words(capsys.readouterr().out) == words(saved)


def test_help_names_the_true_defaults_of_the_settings() -> None:
    saved = words((HELP / "check.txt").read_text(encoding="utf-8"))

    for name, text in list(describe(Settings()))[:5]:
        assert f"{name} (default: {text})" in saved
    assert f"(default: {Settings().gpu_share_weight})" in saved


def test_every_command_takes_a_gpu() -> None:
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
    assert "peers" in captured.err


@pytest.mark.parametrize(
    "argv", [["unknown"], ["peers", "--gpu"], ["check", "--port", "1"], ["peers", "extra"]]
)
def test_illegal_arguments_are_a_usage_error(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)

    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ocgpu")


@pytest.mark.parametrize("argv", [["peers"], ["check"]])
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


def test_peers_are_plain_columns_without_a_terminal(
    registry: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peers", "--gpu", "card"]) == 0

    assert capsys.readouterr().out == (
        "gpu card: 2 peers, schedule grid\n"
        "PID   WEIGHT  SHARE  BUSY   STATE    HEARTBEAT  SLOT  NAME\n"
        "4711  2       66.7%  31.0%  running  212ms      0     chat\n"
        "12    1.5     33.3%  0.0%   idle     3ms        15    [red]x[/]\\x1b[2J\\nroot\n"
    )


def test_names_are_shown_as_they_are_on_a_terminal(
    registry: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "120")

    assert main(["peers", "--gpu", "card"]) == 0

    out = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert r"[red]x[/]\x1b[2J\nroot" in out
    assert "\x1b[2J" not in out
    assert "66.7%" in out


def test_a_name_in_letters_that_stdout_has_not_is_escaped(
    registry: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.peers = [SimpleNamespace(**(vars(PEERS[0]) | {"name": "Grüße"}))]
    stdout = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)

    assert main(["peers", "--gpu", "card"]) == 0

    assert stdout.buffer.getvalue().endswith(rb"Gr\xfc\xdfe" + b"\n")  # type: ignore[attr-defined]


def test_a_real_peer_is_listed_by_a_real_command(processes: Processes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ocgpu.Pacer(weight=2.0, name="chat [b]"):
        command = [sys.executable, "-m", "ocgpu", "peers"]
        plain = processes.start(command, log=log)
        assert plain.wait(timeout=10) == 0
        title, _, row = log.read_text().splitlines()

        assert processes.start([*command, "--json"], log=log).wait(timeout=10) == 0
        answer = json.loads(log.read_text())

    key = os.environ["OCGPU_GPU_KEY"]
    assert title == f"gpu {key}: 1 peer, schedule grid"
    assert row.split()[:5] == [str(os.getpid()), "2", "0.0%", "0.0%", "idle"]
    assert row.endswith("  chat [b]")
    assert (answer["gpu_key"], answer["self"]) == (key, None)
    assert [peer["pid"] for peer in answer["peers"]] == [os.getpid()]


def test_no_peers_is_said_in_one_line(
    registry: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.peers = []

    assert main(["peers", "--gpu", "card"]) == 0

    assert capsys.readouterr().out == "gpu card: no peers, schedule grid\n"


def test_peers_as_json_is_what_the_library_says(
    registry: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OCGPU_GPU_KEY", "pretend")

    assert main(["peers", "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == {"gpu_key": "pretend", "self": None, "peers": []}
    assert registry.asked == "pretend"
