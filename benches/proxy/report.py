"""The table, as Markdown, and everything measured, as JSON."""

import json
from dataclasses import dataclass, field

from benches.proxy.rows import Bar, Row, cell
from benches.proxy.samples import Samples, spread
from benches.proxy.targets import DIRECT, GO, NGINX, OCGPU

__all__ = ["Report"]

COLUMNS = (OCGPU, NGINX, GO, DIRECT)


@dataclass
class Report:
    """Everything that one run measured.

    Attributes:
        conditions: What it ran on and how, a line each.
        samples: By row, then by target.
        failures: What could not be measured, and why.
        lines: Finished rows of what is measured otherwise.
    """

    conditions: dict[str, str] = field(default_factory=dict)
    samples: dict[str, Samples] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    lines: list[list[str]] = field(default_factory=list)

    def to_json(self, rows: list[Row]) -> str:
        """All figures, nothing left out, and what they come to."""
        verdicts = {
            row.name: [
                {
                    "unit": bar.unit.strip(),
                    "limit": bar.limit,
                    "values": values,
                    "met": bar.met(values),
                }
                for bar in row.bars
                if (values := bar.values(self.samples.get(row.name, {})))
            ]
            for row in rows
        }
        everything = {
            "conditions": self.conditions,
            "samples": self.samples,
            "bars": verdicts,
            "failures": self.failures,
            "lines": self.lines,
        }
        return json.dumps(everything, indent=1)

    def to_markdown(self, rows: list[Row]) -> str:
        """The conditions and the table."""
        parts = ["\n".join(f"- {name}: {value}" for name, value in self.conditions.items())]
        if self.failures:
            parts.append("\n".join(f"- not measured: {failure}" for failure in self.failures))
        lines = [list(self._line(row)) for row in rows] + self.lines
        parts.append(_table(["what", *COLUMNS, "bar: reached"], lines))
        return "\n\n".join(parts) + "\n"

    def _line(self, row: Row) -> list[str]:
        samples = self.samples.get(row.name, {})
        cells = [cell(row, samples[name]) if samples.get(name) else "" for name in COLUMNS]
        verdicts = [_verdict(bar, samples) for bar in row.bars]
        return [row.title, *cells, "; ".join(filter(None, verdicts + _faults(row, samples)))]


def _faults(row: Row, samples: Samples) -> list[str]:
    """What makes a row worth less than it says."""
    found = []
    for name, of in samples.items():
        if faults := sum(sample.get("faults", 0) for sample in of):
            found.append(f"**{faults} faults of {name}**")
        if row.fresh and name != DIRECT and any(s["accepted"] < s["count"] for s in of):
            found.append(f"**{name} used upstream connections again**")
    return found


def _verdict(bar: Bar, samples: Samples) -> str:
    values = bar.values(samples)
    if bar.limit is None:
        return f"{spread(values, bar.digits)}{bar.unit}" if values else ""
    bound = f"{'>=' if bar.least else '<='} {bar.limit:g}{bar.unit}"
    if not values:
        return f"{bound}: not measured"
    return f"{bound}: {spread(values, bar.digits)}, {'met' if bar.met(values) else '**missed**'}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
