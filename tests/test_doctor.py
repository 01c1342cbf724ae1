"""The command `ocgpu doctor`: its lines, its JSON, its exit status, and that it leaves nothing."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ocgpu import doctor
from ocgpu.cli import main
from ocgpu.doctor import examine, report
from ocgpu.doctor.finding import Finding, error, ok, split_message, warning
from ocgpu.forms import Listen
from ocgpu.settings import Settings, describe
from tests.fakes import Engines
from tests.processes import Processes
from tests.server.served import start_serve

LINES = [
    ok("gpu key", "card"),
    warning("container", "it is\nprivate", "share it"),
    error("ollama", "is [red]down[/red]", "start it"),
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name, _ in describe(Settings()) if name != "OCGPU_GPU_KEY"]:
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


def flags(engines: Engines) -> list[str]:
    """Flags for a machine on which nothing is wrong."""
    urls = ["--ollama-url", engines.ollama.url, "--comfy-url", engines.comfy.url]
    any_port = "127.0.0.1:0"
    listen = ["--listen-ollama", any_port, "--listen-comfy", any_port, "--listen-admin", any_port]
    return [*urls, *listen]


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_a_line_a_check_and_status_0_without_an_error(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *flags(engines)]) == 0

    lines = capsys.readouterr().out.splitlines()
    for line in lines[:-1]:
        assert re.fullmatch(r"(ok|warning|error) {2,}[A-Za-z_ ]+: .+", line), line
    checks = [line.partition("  ")[2].strip().partition(":")[0] for line in lines[:-1]]
    assert len(checks) == len(set(checks))
    assert set(checks) == {
        *("gpu key", "driver", "cuda variables", "directory", "file system", "locks"),
        *("container", "segment", "lease files", "files in use", "registry", "serves", "lease"),
        *("ollama", "comfyui", "LISTEN_OLLAMA", "LISTEN_COMFY", "LISTEN_ADMIN"),
        *("versions", "open files", "clock source", "clock"),
    }


def test_nothing_is_left_behind(gpu_dir: Path, gpu_key: str, engines: Engines) -> None:
    assert main(["doctor", "--gpu", gpu_key, *flags(engines)]) == 0

    assert list(gpu_dir.iterdir()) == []


@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_an_error_is_status_1_and_json_has_all_of_it(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.kill(engines.comfy)

    assert main(["doctor", "--json", *flags(engines)]) == 1

    findings = json.loads(capsys.readouterr().out)
    assert {tuple(finding) for finding in findings} == {("check", "status", "found", "remedy")}
    (wrong,) = [finding for finding in findings if finding["status"] == "error"]
    assert wrong == {
        "check": "comfyui",
        "status": "error",
        "found": f"{engines.comfy.url}: refuses connections",
        "remedy": "start it, or correct the port in its URL",
    }
    assert {f["remedy"] for f in findings if f["status"] == "ok"} == {None}


def test_a_directory_that_is_missing_is_an_error_and_the_rest_is_examined(
    engines: Engines, gpu_key: str, gpu_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_dir.rmdir()

    assert main(["doctor", *flags(engines)]) == 1

    out = capsys.readouterr().out
    assert f"error    directory: `{gpu_dir}` does not exist; create it" in out
    assert f"gpu key: {gpu_key}, " in out
    assert "ok       ollama: " in out


def test_an_upstream_at_its_default_address_is_needed_by_a_serve_alone() -> None:
    assert doctor._needed(Settings(), serving=False) == (False, False)
    assert doctor._needed(Settings(), serving=True) == (True, True)
    assert doctor._needed(Settings(ollama_url="http://there"), serving=False) == (True, False)
    assert doctor._needed(Settings(comfy_url="http://there"), serving=False) == (False, True)


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.usefixtures("gpu_dir", "gpu_key")
def test_a_running_serve_is_known_before_its_upstreams_are_judged(
    engines: Engines,
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    running: bool,
) -> None:
    served = start_serve(processes, engines, tmp_path / "log")
    admin = Listen(host="127.0.0.1", port=urlsplit(served.admin).port or 0)
    seen = []
    needed = doctor._needed

    def note(settings: Settings, *, serving: bool) -> tuple[bool, bool]:
        seen.append(serving)
        return needed(settings, serving=serving)

    monkeypatch.setattr(doctor, "_needed", note)
    urls = {"ollama_url": engines.ollama.url, "comfy_url": engines.comfy.url}
    off: dict[str, None] = {"listen_ollama": None, "listen_comfy": None}

    examine(Settings(**urls, **off, listen_admin=admin if running else None))

    assert seen == [running]


@pytest.mark.usefixtures("gpu_dir")
def test_a_gpu_that_is_not_there_is_a_line_and_no_end(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--gpu", "99", *flags(engines)]) == 1

    out = capsys.readouterr().out
    assert re.search(r"^error    gpu key: no GPU", out, re.MULTILINE)
    assert "registry" not in out.replace("without a lease", "")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gpu", "a/b"], "invalid `gpu`"),
        (["--ollama-url", "gpu.lan"], "invalid `OLLAMA_URL`"),
        (["--config", "/nowhere/ocgpu.toml"], "invalid `--config`"),
    ],
)
def test_illegal_settings_are_status_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *argv]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err


@pytest.mark.usefixtures("gpu_key")
def test_a_check_that_cannot_look_is_an_error_and_the_others_go_on(
    gpu_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a path may be: the kernel refuses to look at all.
    monkeypatch.setenv("OCGPU_DIR", f"{gpu_dir}/{'x' * 300}")

    findings = examine(Settings(ollama_url="", comfy_url="", listen_admin=None))

    assert findings[0].check == "gpu key"
    assert [f.check for f in findings if f.status == "error"][:2] == ["directory", "segment"]
    assert "File name too long" in str(findings)
    assert findings[-1].check == "clock"


def test_lines_are_plain_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report.show(LINES)

    assert capsys.readouterr().out.splitlines() == [
        "ok       gpu key: card",
        "warning  container: it is\\nprivate; share it",
        "error    ollama: is [red]down[/red]; start it",
        "1 error, 1 warning",
    ]


def test_the_summary_counts(capsys: pytest.CaptureFixture[str]) -> None:
    report.show([LINES[2], LINES[2]])
    report.show(LINES[:1])

    lines = capsys.readouterr().out.splitlines()
    assert (lines[2], lines[-1]) == ("2 errors", "all is well")


def test_a_terminal_gets_columns_and_no_markup_of_others() -> None:
    code = (
        "from ocgpu.doctor import report\n"
        "from ocgpu.doctor.finding import error\n"
        "report.show([error('ollama', 'is [red]down[/red]', 'start it')])"
    )
    main_end, terminal = pty.openpty()
    environ = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=terminal, env=environ, timeout=20, check=True
    )
    os.close(terminal)
    text = os.read(main_end, 65536).decode()
    os.close(main_end)

    assert done.returncode == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert plain[0].split() == ["error", "ollama", "is", "[red]down[/red]"]
    assert plain[1].strip() == "→ start it"
    assert plain[2] == "1 error"


def test_a_message_is_taken_apart_into_what_and_remedy() -> None:
    assert split_message("no GPU; set a name") == ("no GPU", "set a name")
    assert split_message("a; b; c") == ("a; b", "c")
    assert split_message("nothing to do")[0] == "nothing to do"


def test_findings_are_fit_to_be_shown() -> None:
    finding = warning("container", "a\x1b[2J", "b\n")

    assert finding == Finding("container", "warning", "a\\x1b[2J", "b\\n")
