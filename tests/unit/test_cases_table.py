"""tests/CASES.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_that_the_table_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS / "CASES.md").read_text(encoding="utf-8"))
    assert len(named) > 50
    for file, name in named:
        assert re.search(rf"^(async )?def {name}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE), name


def test_every_row_names_one() -> None:
    rows = [line for line in (TESTS / "CASES.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    for row in rows:
        assert "::" in row or row.startswith(("| row |", "| kind |")), row
