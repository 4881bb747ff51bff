"""Why a draft has its target's dtype, said truly for each method."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.config import Settings
from server.engine.plan import check_plan
from tests.spec.override_models import NEURAL, write_folders


@pytest.fixture(scope="module")
def reasons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The row's reason, by proposer."""
    folders = write_folders(tmp_path_factory.mktemp("dtype"))
    return {proposer: reason(folders.target, folders.drafts[proposer]) for proposer in NEURAL}


def reason(target: Path, draft: dict[str, object]) -> str:
    report = check_plan(Settings.model_validate({"model": str(target), "dtype": "float32", "speculative": draft}))
    [row] = [row for row in report.rows if (row.role, row.component) == ("draft", "dtype")]
    assert (row.requested, row.resolved, row.source) == ("unset", "float32", "inherited")
    return row.why


@pytest.mark.parametrize("proposer", NEURAL)
def test_only_heads_read_hidden_states(proposer: str, reasons: dict[str, str]) -> None:
    crosses = "hidden states cross over" in reasons[proposer]
    assert crosses == (proposer != "draft_model")
    assert crosses or "a draft has no key of its own for it" in reasons[proposer]
