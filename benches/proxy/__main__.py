"""Measure the proxy beside its peers: `python -m benches.proxy`, or `make bench-proxy`.

Every figure of the table comes from one run, in rounds, each of which measures every row of every
target, so that a neighbour's load falls on all of them. Linux only.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from benches.proxy.conditions import CoresUse, load_text, versions
from benches.proxy.report import Report
from benches.proxy.rows import ROWS, Row
from benches.proxy.samples import Sample
from benches.proxy.slices import shorten_slices
from benches.proxy.soak import TITLE, soak
from benches.proxy.targets import Bench, Target, open_bench
from benches.sharing.conditions import preference, preferred

WARM_UP_SECONDS = 0.3
WATCHDOG_SECONDS = 60.0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benches.proxy")
    names = ", ".join(row.name for row in ROWS)
    parser.add_argument("--only", default="", help=f"rows whose name this regex finds: {names}")
    parser.add_argument("--seconds", type=float, default=1.2, help="a row, target and round")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument(
        "--soak",
        action="store_true",
        help="also look what 100,000 requests and 6,000 aborted streams leave behind (about 1 min)",
    )
    parser.add_argument(
        "--first",
        action="store_true",
        help="be preferred on the cores to other sessions meanwhile; root only",
    )
    parser.add_argument("--json", type=Path, default=None, help="write every figure here")
    return parser


def main() -> int:
    """Measure, then print the table."""
    arguments = make_parser().parse_args()
    rows = [row for row in ROWS if re.search(arguments.only, row.name)]
    # Where the registry lives by default: a file system in memory.
    with (
        preferred() if arguments.first else nullcontext(),
        # Before anything is started: children inherit it.
        nullcontext(shorten_slices() if arguments.first else "usual") as slices,
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        open_bench(Path(folder)) as bench,
    ):
        report = measure(bench, rows, arguments)
        report.conditions["time slices"] = slices
    if arguments.json is not None:
        arguments.json.write_text(report.to_json(rows), encoding="utf-8")
    sys.stdout.write(report.to_markdown(rows))
    return 0


def measure(bench: Bench, rows: list[Row], arguments: argparse.Namespace) -> Report:
    """Measure every row of every target in every round, and soak at last if that is asked for."""
    rounds, seconds = arguments.rounds, arguments.seconds
    report = Report({**versions(), "pinning": "none: load, upstream and proxy share the cores"})
    report.conditions["begun"] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    report.conditions["each figure"] = f"{rounds} rounds of {seconds:g} s, the middle round's"
    report.conditions["preference on the cores"] = preference()
    report.conditions["load average at the start"] = load_text()
    report.failures += bench.absent
    use = CoresUse(bench.pids)
    for number in range(rounds):
        for row in rows:
            say(f"round {number + 1} of {rounds}: {row.name}")
            # Back and forth, so that no target always comes after the same one.
            for target in bench.targets[:: 1 if number % 2 else -1]:
                if target.name in row.targets:
                    _sample(report, bench, row, target, seconds)
    if arguments.soak:
        _soak(report, bench)
    report.conditions["load average at the end"] = load_text()
    report.conditions["the cores' time"] = use.text()
    return report


def _sample(report: Report, bench: Bench, row: Row, target: Target, seconds: float) -> None:
    if any(failure.startswith(f"{row.name} of {target.name}:") for failure in report.failures):
        return
    samples = report.samples.setdefault(row.name, {})
    try:
        samples.setdefault(target.name, []).append(sample(bench, row, target, seconds))
    except (subprocess.SubprocessError, ValueError) as error:
        samples.pop(target.name, None)
        report.failures.append(f"{row.name} of {target.name}: {_reason(error)}")
        say(report.failures[-1])


def sample(bench: Bench, row: Row, target: Target, seconds: float) -> Sample:
    """Run the load once.

    Raises:
        CalledProcessError: It failed, and says why on stderr.
    """
    options = ["--port", str(target.ports[row.listener]), "--upstream", str(bench.upstream)]
    options += ["--comfy", str(bench.comfy)]
    if row.timed:
        options += ["--seconds", str(seconds), "--warm-up", str(WARM_UP_SECONDS)]
        options += ["--pid", str(target.pid)]
    ran = subprocess.run(
        [bench.load, row.mode, *row.options, *options],
        capture_output=True,
        text=True,
        check=True,
        timeout=WATCHDOG_SECONDS,
    )
    found: Sample = json.loads(ran.stdout)
    return found


def _soak(report: Report, bench: Bench) -> None:
    say("soak")
    try:
        ours, verdict = soak(bench).cells()
    except (subprocess.SubprocessError, ValueError) as error:
        report.failures.append(f"soak: {_reason(error)}")
    else:
        report.lines.append([TITLE, ours, "", "", "", verdict])


def _reason(error: Exception) -> str:
    return str(getattr(error, "stderr", None) or error).strip()


def say(line: str) -> None:
    """Tell what is going on."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
