"""Measure how one contended core is shared: `python -m benches.sharing`, or `make bench-share`.

Workers hash bytes on one core, this program keeps to the others. Every case runs unpaced and under
each schedule, one after the other, and every run is reported. Linux only.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

from tests.sharers import Device, has_schedule

from benches.sharing.conditions import load, machine, preference, preferred
from benches.sharing.latencies import FAULTS, WAITS, fault
from benches.sharing.report import Report
from benches.sharing.splits import CASES, runs

FULL = {"seconds": 30.0, "warm_up": 3.0, "repeats": 10}
QUICK = {"seconds": 5.0, "warm_up": 1.0, "repeats": 3}
WAIT_SECONDS = 20.0
DEVICES = {
    "sliced": "one core, cut into slices by the operating system",
    "queue": "one core, one step at a time in the order of arrival",
}


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benches.sharing")
    parser.add_argument("--seconds", type=float, help="a case and schedule (default: 30)")
    parser.add_argument("--warm-up", type=float, help="seconds before each (default: 3)")
    parser.add_argument("--repeats", type=int, help="of each fault (default: 10)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="defaults of 5 s a case, 1 s of warm-up and 3 repeats",
    )
    parser.add_argument("--only", default="", help="cases whose name this regex finds")
    parser.add_argument("--schedules", nargs="+", default=["grid", "turn"], help="default: both")
    parser.add_argument("--device", choices=DEVICES, default="sliced", help="default: sliced")
    parser.add_argument(
        "--first",
        action="store_true",
        help="be preferred on the cores to other sessions meanwhile; root only",
    )
    parser.add_argument("--json", type=Path, default=None, help="write every figure here")
    return parser


def main() -> int:
    """Measure, then print the tables."""
    arguments = make_parser().parse_args()
    for name, value in (QUICK if arguments.quick else FULL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    # Where segments live by default: a file system in memory.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.environ |= {"OCGPU_DIR": folder, "OCGPU_GPU_KEY": "bench"}
        os.environ.pop("OCGPU_SCHEDULE", None)
        schedules = [name for name in arguments.schedules if _known(name)]
        queue = Path(folder) / "queue" if arguments.device == "queue" else None
        with preferred() if arguments.first else nullcontext(), Device(queue) as device:
            report = _measure(arguments, device, schedules)
    if arguments.json is not None:
        arguments.json.write_text(report.to_json(), encoding="utf-8")
    sys.stdout.write(report.to_markdown())
    return 0


def _measure(arguments: argparse.Namespace, device: Device, schedules: list[str]) -> Report:
    report = Report(
        conditions={
            **machine(),
            "device": f"{DEVICES[arguments.device]} (core {device.core})",
            "solo work of a millisecond": f"{device.bytes_per_ms} bytes of sha256",
            "each run": f"{arguments.seconds:g} s after {arguments.warm_up:g} s of warm-up, "
            "unpaced half before and half after",
            "begun": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "preference on the cores": preference(),
            "load average at the start": _load(),
        }
    )
    for case in _chosen(CASES, arguments.only):
        for run in runs(device, case, schedules, arguments.seconds, arguments.warm_up):
            report.runs.append(run)
            _say(f"{run.case}, {run.schedule}: error {run.error:.1%}, work {run.rate:.1%}")
    _measure_waits(arguments, device, schedules, report)
    _measure_faults(arguments, device, schedules, report)
    report.conditions["load average at the end"] = _load()
    return report


def _measure_waits(
    arguments: argparse.Namespace, device: Device, schedules: list[str], report: Report
) -> None:
    seconds = min(arguments.seconds, WAIT_SECONDS)
    for what in _chosen(WAITS, arguments.only):
        for schedule in schedules:
            _say(f"{what}, {schedule}")
            found = WAITS[what](device, schedule, seconds)
            report.waits.setdefault(what, {})[schedule] = found


def _measure_faults(
    arguments: argparse.Namespace, device: Device, schedules: list[str], report: Report
) -> None:
    if arguments.device == "queue":
        _say("no faults: one that is stopped within a step would keep this device for ever")
        return
    for kind in _chosen(FAULTS, arguments.only):
        for _ in range(arguments.repeats):
            for schedule in schedules:
                found = fault(device, schedule, kind)
                report.faults.setdefault(kind, {}).setdefault(schedule, []).append(found)
                _say(f"{kind}, {schedule}: {found}")


def _chosen(names: Iterable[str], pattern: str) -> list[str]:
    return [name for name in names if re.search(pattern, name)]


def _known(schedule: str) -> bool:
    if has_schedule(schedule):
        return True
    _say(f"left out, this build has no such schedule: `{schedule}`")
    return False


def _load() -> str:
    return " / ".join(f"{average:.2f}" for average in load())


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
