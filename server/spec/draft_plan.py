"""The resolved draft: what will be built and how it will draft."""

from __future__ import annotations

from dataclasses import dataclass

from server.engine.check import CheckRow
from server.engine.setup import ModelSetup
from server.spec.settings import BatchSizeRule, Method
from server.spec.verify import SyntheticAcceptance


@dataclass(frozen=True)
class DraftPlan:
    """Everything about the draft that is decided before anything is built."""

    method: Method
    num_tokens: int
    """k, the longest draft."""
    adaptive: bool
    rules: tuple[BatchSizeRule, ...]
    setup: ModelSetup | None
    """None for a method without a draft model."""
    capture: tuple[int, ...]
    """Layer boundaries of the target whose hidden states the draft reads."""
    max_model_len: int
    """Positions beyond which a sequence goes on without drafts."""
    shared_vocab_size: int
    """Ids that target and draft both know."""
    probabilistic: bool
    synthetic: SyntheticAcceptance | None
    lookup: tuple[int, int]
    """Shortest and longest match of ngram."""
    rows: tuple[CheckRow, ...]
    """How it drafts; what its model is built with stands in `setup.rows`."""
