"""What `outrider check` prints, and its exit code."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from server.check import report_json, show
from server.engine.check import CheckReport, CheckRow
from server.messages import KVGroup

REPORT = CheckReport(
    ok=True,
    rows=(
        CheckRow("target", "moe", "torch_int4", "torch_int4", "explicit", "asked for"),
        CheckRow(
            "draft",
            "moe",
            "auto",
            "grouped_mm",
            "auto",
            "the first of the preference order that can serve [all of it]",
            rejected=(("torch_int4", "takes 4-bit weights only; the draft's experts are plain " + "x" * 300),),
        ),
    ),
    kv_groups=(KVGroup(0, 128, 64, 0, 31),),
)
REFUSED = CheckReport(ok=False, errors=("--speculative-config.moe_backend 'x': cannot serve the draft",))


def printed(report: CheckReport, width: int = 200) -> str:
    out = io.StringIO()
    show(report, Console(file=out, width=width))
    return out.getvalue()


def test_people_read_every_row_and_every_reason() -> None:
    text = printed(REPORT)
    header, target, draft = text.splitlines()[:3]
    assert header.split() == ["role", "component", "requested", "resolved", "source", "why"]
    assert target.split() == ["target", "moe", "torch_int4", "torch_int4", "explicit", "asked", "for"]
    assert draft.split()[:5] == ["draft", "moe", "auto", "grouped_mm", "auto"] and "[all of it]" in draft
    assert f"not for the draft's moe: torch_int4: {REPORT.rows[1].rejected[0][1]}\n" in text
    assert "KV group 0: 31 layers, blocks of 128 tokens, kernel pages of 64\n" in text
    assert text.splitlines()[-1] == "can be served"


def test_people_read_why_it_cannot_be_served() -> None:
    assert printed(REFUSED).splitlines() == [f"error: {REFUSED.errors[0]}", "cannot be served"]


def test_programs_read_the_format_of_the_contract() -> None:
    shown = json.loads(json.dumps(report_json(REPORT)))
    assert (shown["ok"], shown["errors"]) == (True, [])
    assert shown["rows"][1] == {
        "role": "draft",
        "component": "moe",
        "requested": "auto",
        "resolved": "grouped_mm",
        "source": "auto",
        "why": REPORT.rows[1].why,
        "rejected": [{"name": "torch_int4", "reason": REPORT.rows[1].rejected[0][1]}],
    }
    assert shown["kv_groups"] == [
        {"group": 0, "block_size": 128, "kernel_page_size": 64, "num_blocks": 0, "layers": 31}
    ]
    assert report_json(REFUSED) == {"ok": False, "rows": [], "kv_groups": [], "errors": list(REFUSED.errors)}


@pytest.mark.parametrize(("report", "code"), [(REPORT, 0), (REFUSED, 1)])
def test_the_command_plans_prints_and_says_so_in_its_exit_code(
    report: CheckReport, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from server.cli import main
    from server.engine import plan

    monkeypatch.setattr(plan, "check_plan", lambda settings: report if settings.model == "m" else None)
    assert main(["check", "m", "--speculative-config.method", "ngram", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == report_json(report)
    assert main(["check", "m"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == ("can be served" if report.ok else "cannot be served")
