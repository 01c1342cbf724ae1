"""The tables, as Markdown, and everything measured, as JSON."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import mean

from tests.traces import percentile

from benches.sharing.latencies import Fault
from benches.sharing.splits import Run

__all__ = ["Report"]


@dataclass
class Report:
    """Everything that one run of the benchmark measured.

    Attributes:
        conditions: What it ran on and how, a line each.
        runs: The splits, in the order of measuring.
        waits: Seconds by what was waited for, then by schedule.
        faults: What the survivors saw, by fault, then by schedule.
    """

    conditions: dict[str, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    waits: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    faults: dict[str, dict[str, list[Fault]]] = field(default_factory=dict)

    def to_json(self) -> str:
        """All figures, nothing left out."""
        return json.dumps(asdict(self), indent=1)

    def to_markdown(self) -> str:
        """The tables that have something to show, and the conditions."""
        schedules = sorted(self._schedules() - {"unpaced"})
        parts = [_list(self.conditions)]
        if self.runs:
            parts += [self._splits(schedules), self._summary(schedules), self._cores()]
        if self.waits:
            parts.append(self._waits(schedules))
        if self.faults:
            parts.append(self._faults(schedules))
        return "\n\n".join(parts) + "\n"

    def _schedules(self) -> set[str]:
        found = {run.schedule for run in self.runs}
        return found.union(*self.waits.values(), *self.faults.values())

    def _of(self, schedule: str, case: str | None = None) -> list[Run]:
        return [r for r in self.runs if r.schedule == schedule and case in {None, r.case}]

    def _aggregate(self, run: Run) -> float:
        return 100 * run.rate / mean(r.rate for r in self._of("unpaced", run.case))

    def _aggregate_of_left(self, run: Run) -> float:
        unpaced = self._of("unpaced", run.case)
        return 100 * run.rate_of_left / mean(r.rate_of_left for r in unpaced)

    def _splits(self, schedules: list[str]) -> str:
        rows = []
        for case in dict.fromkeys(run.case for run in self.runs):
            unpaced = self._of("unpaced", case)
            stall = [max(run.stall_ms[i] for run in unpaced) for i in range(3)]
            cells = [f"{100 * mean(run.error for run in unpaced):.1f} / {_dashed(stall)}"]
            cells += ["; ".join(map(self._cell, self._of(name, case))) for name in schedules]
            rows.append([case, *cells])
        head = [f"{name}: error % / aggregate % / stall ms" for name in schedules]
        return _table(["case", "unpaced: error % / stall ms", *head], rows)

    def _cell(self, run: Run) -> str:
        return f"{100 * run.error:.1f} / {self._aggregate(run):.1f} / {_dashed(run.stall_ms)}"

    def _summary(self, schedules: list[str]) -> str:
        rows = []
        for name in schedules:
            found = self._of(name)
            errors = [100 * run.error for run in found]
            whole = [self._aggregate(run) for run in found]
            left = [self._aggregate_of_left(run) for run in found]
            rows.append(
                [
                    name,
                    f"{mean(errors):.1f} / {max(errors):.1f}",
                    f"{mean(whole):.1f} / {min(whole):.1f}",
                    f"{mean(left):.1f} / {min(left):.1f}",
                ]
            )
        aggregate = "aggregate %, mean / worst"
        return _table(
            ["over all cases", "error %, mean / worst", aggregate, "the same of what others left"],
            rows,
        )

    def _cores(self) -> str:
        rows = [
            [
                run.case,
                run.schedule,
                f"{run.seconds:.1f}",
                " : ".join(f"{100 * share:.1f}" for share in run.shares),
                *(f"{100 * part:.1f}" for part in asdict(run.core).values()),
                f"{100 * run.rate:.1f}",
                f"{self._aggregate_of_left(run):.1f}",
            ]
            for run in self.runs
        ]
        head = ["every run, in order", "schedule", "s", "shares %", "workers %", "idle %"]
        head += ["steal %", "others %", "work %", "aggregate % of what others left"]
        return _table(head, rows)

    def _waits(self, schedules: list[str]) -> str:
        rows = [
            [what, *(_wait(found.get(name, [])) for name in schedules)]
            for what, found in self.waits.items()
        ]
        return _table(["ms, p50 / p99 / longest (n)", *schedules], rows)

    def _faults(self, schedules: list[str]) -> str:
        rows = [
            [kind, *(_fault(found.get(name, [])) for name in schedules)]
            for kind, found in self.faults.items()
        ]
        head = "of one of two: ms to 95 % of solo, p50 / worst; longest stall ms, p50 / worst; "
        head += "most of the core to others meanwhile, % (n)"
        return _table([head, *schedules], rows)


def _wait(seconds: list[float]) -> str:
    if not seconds:
        return "none seen"
    parts = (f"{percentile(seconds, p) * 1000:.2f}" for p in (50, 99, 100))
    return " / ".join(parts) + f" ({len(seconds)})"


def _fault(found: list[Fault]) -> str:
    back = [fault.recovery_s * 1000 for fault in found if fault.recovery_s is not None]
    stalls = [fault.stall_ms for fault in found]
    never = f", {len(found) - len(back)} not within 6 s" if len(back) < len(found) else ""
    times = f"{percentile(back, 50):.0f} / {percentile(back, 100):.0f}"
    others = max(fault.core.others + fault.core.steal for fault in found)
    stall = f"{percentile(stalls, 50):.0f} / {max(stalls):.0f}"
    return f"{times}{never}; {stall}; {100 * others:.0f} ({len(found)})"


def _dashed(values: Iterable[float]) -> str:
    return "-".join(f"{value:.0f}" for value in values)


def _list(lines: dict[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in lines.items())


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
