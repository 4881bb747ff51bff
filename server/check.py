"""`outrider check`: what the server would build, printed for people or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from server.config import Settings
from server.resolved_table import COLUMNS, give_room, kv_group_line, resolved_table

if TYPE_CHECKING:
    from server.engine.check import CheckReport


def check(settings: Settings, console: Console, *, as_json: bool) -> int:
    """Plan, print the plan on `console`, and return the exit code: 0 when the server could start, else 1."""
    # Torch takes seconds to import, and of the commands in this process only this one needs it.
    from server.engine.plan import check_plan

    report = check_plan(settings)
    give_room(console)
    if as_json:
        console.print(json.dumps(report_json(report), indent=2), markup=False, highlight=False, soft_wrap=True)
    else:
        show(report, console)
    return 0 if report.ok else 1


def report_json(report: CheckReport) -> dict[str, Any]:
    """The report as plain values: ok, rows (each with what was rejected), kv_groups, errors."""
    return {
        "ok": report.ok,
        "rows": [
            {
                **{column: getattr(row, column) for column in COLUMNS},
                "rejected": [{"name": name, "reason": reason} for name, reason in row.rejected],
            }
            for row in report.rows
        ],
        "kv_groups": [msgspec.to_builtins(group) for group in report.kv_groups],
        "errors": list(report.errors),
    }


def show(report: CheckReport, console: Console) -> None:
    """The table of rows, what could not serve, the KV groups, and the verdict."""
    if report.rows:
        console.print(resolved_table(report.rows))
    for row in report.rows:
        for name, reason in row.rejected:
            _line(console, f"not for the {row.role}'s {row.component}: {name}: {reason}")
    for group in report.kv_groups:
        _line(console, kv_group_line(group))
    for error in report.errors:
        _line(console, f"error: {error}")
    _line(console, "can be served" if report.ok else "cannot be served")


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
