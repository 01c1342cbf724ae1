"""The findings for a person, a line each, and as JSON for a program."""

import json
import sys
from collections import Counter
from collections.abc import Sequence

from ocgpu.doctor.finding import Finding

__all__ = ["show", "to_json"]

_COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}


def to_json(findings: Sequence[Finding]) -> str:
    """Write `[{check, status, found, remedy}, …]`; `remedy` is null where nothing is to be done."""
    return json.dumps([finding._asdict() for finding in findings])


def show(findings: Sequence[Finding]) -> None:
    """Write the findings to stdout; without a terminal in plain lines that scripts can rely on."""
    if sys.stdout.isatty():
        _show_framed(findings)
        return
    for finding in findings:
        remedy = "" if finding.remedy is None else f"; {finding.remedy}"
        sys.stdout.write(f"{finding.status:<7}  {finding.check}: {finding.found}{remedy}\n")
    sys.stdout.write(f"{_summary(findings)}\n")


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.status for finding in findings)
    parts = [
        f"{counts[status]} {status}{'' if counts[status] == 1 else 's'}"
        for status in ("error", "warning")
        if counts[status]
    ]
    return ", ".join(parts) or "all is well"


def _show_framed(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        # `Text` is taken as it is: a name such as `[red]` must not become markup.
        cell = Text(finding.found)
        if finding.remedy is not None:
            cell.append(f"\n→ {finding.remedy}", style="bold")
        status = Text(finding.status, style=_COLOURS[finding.status])
        grid.add_row(status, Text(finding.check), cell)
    console = Console()
    console.print(grid)
    console.print(Text(_summary(findings), style="bold"))
