"""Targets and the drafts that the tests of speculation share, made once a session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.spec.tiny_eagle3 import write_eagle3
from tests.spec.tiny_models import noisy_copy, self_draft, write_glm4_moe, write_llama


@dataclass(frozen=True)
class Pair:
    """A target and what is said about its draft."""

    target: Path
    speculative: dict[str, Any]


def write_pairs(folder: Path) -> dict[str, Pair]:
    """By name: every method, and drafts from perfect to useless."""
    llama = write_llama(folder / "llama", num_hidden_layers=4)
    glm = write_glm4_moe(folder / "glm")
    head = write_eagle3(llama, folder / "eagle3")
    other = write_llama(folder / "other", seed=7)
    return {
        "ngram": Pair(llama, {"method": "ngram"}),
        "self": Pair(llama, {"method": "draft_model", "model": str(self_draft(llama, folder / "self"))}),
        "noisy": Pair(llama, {"method": "draft_model", "model": str(noisy_copy(llama, folder / "noisy", 0.05))}),
        "independent": Pair(llama, {"method": "draft_model", "model": str(other)}),
        "eagle3": Pair(llama, {"method": "eagle3", "model": str(head)}),
        "mtp": Pair(glm, {"method": "mtp"}),
    }
