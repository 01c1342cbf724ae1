"""What the README shows is true: its Python runs, its commands parse, its table is right."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ocgpu.cli import make_parser
from ocgpu.settings import VARIABLES, Settings, describe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SHELL = "\n".join(re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
COMMANDS = [line for line in SHELL.splitlines() if line.startswith("ocgpu ")]


def settings_table() -> list[str]:
    defaults = dict(describe(Settings()))
    rows = [
        f"| `{variable.name}` | {f'`{default}`' if default else ''} | {variable.meaning} |"
        for variable in VARIABLES
        for default in [defaults[variable.name]]
    ]
    return ["| variable | default | meaning |", "|---|---|---|", *rows]


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: str(PYTHON.index(code)))
def test_python_of_the_readme_runs(code: str, tmp_path: Path) -> None:
    environ = os.environ | {"OCGPU_DIR": str(tmp_path), "OCGPU_GPU_KEY": "readme"}

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_readme_are_commands(command: str) -> None:
    arguments = make_parser().parse_args(shlex.split(command)[1:])

    assert callable(arguments.command)


def test_readme_shows_the_three_uses_on_its_first_screen() -> None:
    first = README.splitlines()[:20]

    for use in (
        "make demo",
        "make test",
        "pip install ocgpu",
        "`Pacer`",
        "`Lease`",
        "`ocgpu serve`",
    ):
        assert any(use in line for line in first)
    assert len(PYTHON) >= 2
    assert {shlex.split(command)[1] for command in COMMANDS} >= {"serve", "run", "lease", "check"}


def test_settings_table_of_the_readme_is_that_of_the_settings() -> None:
    _, _, rest = README.partition("<!-- settings:")
    shown = [line for line in rest.splitlines() if line.startswith("|")]

    assert shown == settings_table()


def test_readme_names_every_setting_that_has_no_effect_yet() -> None:
    sources = (ROOT / "python" / "ocgpu" / "server").rglob("*.py")
    server = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    unused = [v.name for v in VARIABLES if not re.search(rf"settings\.{v.field}\b", server)]

    (named,) = re.findall(r"without effect so far:\n  ([^.]*)\.", README) or [""]

    assert re.findall(r"`([A-Z_]+)`", named) == unused


def test_every_witness_of_a_proof_is_a_test() -> None:
    sources = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "rust" / "core" / "tests").rglob("*.rs")]
    code = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    defined = set(re.findall(r"^\s*(?:async )?(?:def|fn) (\w+)\(", code, re.MULTILINE))

    for proof in (ROOT / "docs" / "proofs").glob("*.md"):
        text = proof.read_text(encoding="utf-8")
        witnesses = set(re.findall(r"`((?:test_|[a-z]+_)\w+_\w+)`", text))
        assert len(witnesses) > 20
        assert witnesses - defined - {"try_acquire", "lease_status"} == set()
