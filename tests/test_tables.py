import json
import os
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace

import pytest

import ocgpu
from ocgpu.cli import main
from ocgpu.tables import lease_table
from tests.processes import Processes

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
        lease="shared",
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
        lease=None,
    ),
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "OCGPU_GPU_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, lease: SimpleNamespace) -> SimpleNamespace:
    """What `ocgpu.peers` answers; `asked` is the GPU that it was asked about."""
    state = SimpleNamespace(peers=PEERS, asked=None)

    def peers(gpu: object = None) -> SimpleNamespace:
        state.asked = gpu
        document = {"gpu_key": gpu, "self": None, "peers": []}
        return SimpleNamespace(
            gpu_key=gpu, schedule="grid", peers=state.peers, to_dict=lambda: document
        )

    monkeypatch.setattr(ocgpu, "peers", peers)
    return state


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What `ocgpu.lease_status` answers."""
    status = SimpleNamespace(held=False, mode=None, holders=[], waiters=[])
    status.to_dict = lambda: {"held": status.held}
    monkeypatch.setattr(ocgpu, "lease_status", lambda gpu=None: status)
    return status


def party(**known: object) -> SimpleNamespace:
    fields = dict.fromkeys(("pid", "name", "mode", "since", "reason"))
    return SimpleNamespace(**(fields | known))


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_peers_are_plain_columns_without_a_terminal(
    registry: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peers", "--gpu", "card"]) == 0

    assert capsys.readouterr().out == (
        "gpu card: 2 peers, schedule grid\n"
        "PID   WEIGHT  SHARE  BUSY   STATE    HEARTBEAT  SLOT  LEASE   NAME\n"
        "4711  2       66.7%  31.0%  running  212ms      0     shared  chat\n"
        "12    1.5     33.3%  0.0%   idle     3ms        15    -       [red]x[/]\\x1b[2J\\nroot\n"
    )


def test_names_are_shown_as_they_are_on_a_terminal(
    registry: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())

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
    assert title == f"gpu {key}: 1 peer, schedule turn"
    assert row.split()[:5] == [str(os.getpid()), "2", "0.0%", "0.0%", "idle"]
    assert row.endswith("  chat [b]")
    assert (answer["gpu_key"], answer["self"]) == (key, None)
    assert [peer["pid"] for peer in answer["peers"]] == [os.getpid()]


def test_a_lease_that_is_held_stands_below_the_peers(
    registry: SimpleNamespace, lease: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.peers = []
    lease.held, lease.mode = True, "exclusive"
    lease.holders = [party(pid=7, name="train", mode="exclusive")]

    assert main(["peers", "--gpu", "card"]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "gpu card: no peers, schedule grid",
        "gpu card: lease held, exclusive",
        "ROLE    PID  MODE       FOR  NAME   REASON",
        "holder  7    exclusive  ?    train  ?",
    ]


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

    document = {"gpu_key": "pretend", "self": None, "peers": [], "lease": {"held": False}}
    assert json.loads(capsys.readouterr().out) == document
    assert registry.asked == "pretend"


def test_a_free_lease_is_said_in_one_line(
    lease: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lease", "--gpu", "card"]) == 0

    assert capsys.readouterr().out == "gpu card: lease free\n"


def test_holders_and_waiters_are_rows_with_their_reason(lease: SimpleNamespace) -> None:
    lease.held, lease.mode = True, "exclusive"
    known = {"name": "train", "mode": "exclusive", "since": 1000.0}
    lease.holders = [party(pid=7, reason="nightly\x07 run", **known)]
    lease.waiters = [party(pid=8, mode="shared"), party(pid=9, reason="", since=1090.5)]

    table = lease_table("card", lease, now=1090.4)  # type: ignore[arg-type]

    assert table.title == "gpu card: lease held, exclusive"
    assert table.rows == [
        ("holder", "7", "exclusive", "1m30s", "train", r"nightly\x07 run"),
        ("waiter", "8", "shared", "?", "?", "?"),
        ("waiter", "9", "?", "0", "?", "''"),
    ]


def test_a_real_holder_is_named_by_a_real_command(processes: Processes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "ocgpu", "lease"]
    with ocgpu.Lease(mode="shared", reason="a [red] reason"):
        assert processes.start(command, log=log).wait(timeout=10) == 0
        title, _, row = log.read_text().splitlines()

        assert processes.start([*command, "--json"], log=log).wait(timeout=10) == 0
        answer = json.loads(log.read_text())

    assert title == f"gpu {os.environ['OCGPU_GPU_KEY']}: lease held, shared"
    assert row.split()[:3] == ["holder", str(os.getpid()), "shared"]
    assert row.endswith("  a [red] reason")
    assert (answer["held"], answer["mode"], answer["waiters"]) == (True, "shared", [])
    assert [holder["pid"] for holder in answer["holders"]] == [os.getpid()]
