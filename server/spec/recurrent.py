"""Drafts of a head that reads the target's hidden states: EAGLE-3 and multi-token prediction.

Slot i of the head's cache holds what it made of (hidden state at i, token i + 1). Each step the head first runs over
the step's kept tokens with the target's true hidden states, which rewrites what it had guessed there; then it runs on
its own hidden states, one token at a time. (EAGLE-3: Li et al. 2025, arXiv 2503.01840; MTP: DeepSeek-V3, arXiv
2412.19437.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from server.engine.batch import Batch, Span
from server.engine.models.draft import DraftHidden, RecurrentDraft, TargetHidden
from server.engine.models.eagle3 import Eagle3Draft
from server.engine.models.mtp import MTPDraft
from server.engine.request import NO_DRAFT, Draft
from server.engine.runner import ModelRunner
from server.engine.step import DraftRow
from server.spec.chain import draft_chain
from server.spec.choice import DraftChoice


class RecurrentProposer:
    """Runs an EAGLE-3 or MTP head."""

    last_slot_looks_ahead: ClassVar[bool] = True

    def __init__(
        self, runner: ModelRunner[Eagle3Draft | MTPDraft], choice: DraftChoice, max_model_len: int, vocab_size: int
    ) -> None:
        """Make a proposer.

        Args:
            runner: the head's.
            choice: how tokens are chosen.
            max_model_len: positions that the head has; beyond them a sequence goes on without drafts.
            vocab_size: the target's.
        """
        self.runner = runner
        self._model: RecurrentDraft = runner.model
        self._choice = choice
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], hidden: TargetHidden) -> list[Draft]:
        """See `Proposer.propose`."""
        drafts = [NO_DRAFT] * len(rows)
        limits = [min(row.limit, max(0, self._max_model_len - len(row.request.tokens))) for row in rows]
        order = sorted((i for i in range(len(rows)) if self._kept(rows[i])), key=lambda i: -limits[i])
        if not order:
            return drafts
        batch = self.runner.batch([self._span(rows[i]) for i in order])
        taken = [range(rows[i].first, rows[i].first + self._kept(rows[i])) for i in order]
        chosen = torch.tensor([index for indices in taken for index in indices], device=batch.input_ids.device)
        made = self._forward(self._model.combine(hidden.select(chosen)), batch, 0)
        live = [i for i in order if limits[i]]
        last = torch.tensor(
            [end - 1 for end in batch.step.query_start[1 : len(live) + 1]], dtype=torch.int64, device=chosen.device
        )
        recurrent = made.recurrent[last]

        def run(rows: Sequence[DraftRow], ids: Tensor, ahead: int) -> Tensor:
            nonlocal recurrent
            # `Span` wants ids, which are on the device already: only places are made here.
            places = [Span(row.request.blocks, row.end - 1 + ahead, (0,)) for row in rows]
            made = self._forward(recurrent[: len(rows)], replace(self.runner.batch(places), input_ids=ids), ahead)
            recurrent = made.recurrent
            return made.output

        chain = draft_chain(
            [rows[i] for i in live], [limits[i] for i in live], self._choice, made.output[last], self._logits, run
        )
        for i, draft in zip(live, chain, strict=True):
            drafts[i] = draft
        return drafts

    def _forward(self, hidden: Tensor, batch: Batch, step: int) -> DraftHidden:
        plan = self.runner.attention.plan(batch.step)
        made: DraftHidden = self._model(hidden, batch.input_ids, batch.positions, plan, step)
        return made

    def _kept(self, row: DraftRow) -> int:
        """Tokens of the step that the head takes in: those kept, whose next token is known, within its positions."""
        return max(0, min(row.end, len(row.request.tokens) - 1, self._max_model_len) - row.start)

    def _span(self, row: DraftRow) -> Span:
        following = row.request.tokens[row.start + 1 : row.start + 1 + self._kept(row)]
        return Span(row.request.blocks, row.start, following)

    def _logits(self, output: Tensor) -> Tensor:
        """[R, V] over the target's vocabulary; what the head does not know is never drafted."""
        logits = self._model.logits(output)
        ids = self._model.target_ids
        if ids is None:
            return logits[:, : self._vocab_size]
        spread = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return spread.index_copy_(1, ids, logits)
