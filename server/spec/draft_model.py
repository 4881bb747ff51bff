"""Drafts of a smaller model with the same vocabulary (Leviathan et al. 2023, arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from server.engine.batch import Batch, Span
from server.engine.models.decoder import CausalLM
from server.engine.models.draft import TargetHidden
from server.engine.request import NO_DRAFT, Draft
from server.engine.runner import ModelRunner, run_whole
from server.engine.step import DraftRow
from server.spec.chain import draft_chain
from server.spec.choice import DraftChoice


class DraftModelProposer:
    """Runs the draft model over what it has not seen, then one token at a time."""

    last_slot_looks_ahead: ClassVar[bool] = False

    def __init__(self, runner: ModelRunner[CausalLM], choice: DraftChoice, max_model_len: int, vocab_size: int) -> None:
        """Make a proposer.

        Args:
            runner: the draft model's.
            choice: how tokens are chosen.
            max_model_len: positions that the draft has; beyond them a sequence goes on without drafts.
            vocab_size: ids that both models know.
        """
        self.runner = runner
        self._choice = choice
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], hidden: TargetHidden) -> list[Draft]:
        """See `Proposer.propose`."""
        drafts = [NO_DRAFT] * len(rows)
        limits = [min(row.limit, max(0, self._max_model_len - len(row.request.tokens))) for row in rows]
        order = sorted(range(len(rows)), key=lambda i: -limits[i])
        spans = {i: self._unseen(rows[i], drafting=limits[i] > 0) for i in order}
        order = [i for i in order if spans[i].token_ids]
        if not order:
            return drafts
        batch = self.runner.batch([spans[i] for i in order])
        output = self._forward(batch)
        live = [i for i in order if limits[i]]
        last = torch.tensor(
            [end - 1 for end in batch.step.query_start[1 : len(live) + 1]], dtype=torch.int64, device=output.device
        )
        chain = draft_chain([rows[i] for i in live], [limits[i] for i in live], output[last], self._pick, self._run)
        for i, draft in zip(live, chain, strict=True):
            drafts[i] = draft
            # The last drafted token itself was not run.
            rows[i].request.draft_computed = len(rows[i].request.tokens) + limits[i] - 1
        return drafts

    def rest(self, rows: Sequence[DraftRow], hidden: TargetHidden) -> list[Draft]:
        """See `Proposer.rest`: of a sequence's own tokens the draft catches up on all at once, when it drafts again."""
        self.propose([replace(row, limit=0) for row in rows if row.in_prompt], hidden)
        return [NO_DRAFT] * len(rows)

    def _pick(self, output: Tensor, rows: Sequence[DraftRow], ahead: int) -> tuple[Tensor, Tensor | None]:
        model = self.runner.model
        if not self._choice.probabilistic:
            return model.highest(output, self._vocab_size), None
        return self._choice.draw(model.logits(output)[:, : self._vocab_size], [row.request for row in rows], ahead)

    def _run(self, rows: Sequence[DraftRow], ids: Tensor, ahead: int) -> Tensor:
        # `Span` wants ids, which are on the device already: only places are made here.
        places = [Span(row.request.blocks, len(row.request.tokens) - 1 + ahead, (0,)) for row in rows]
        return self._forward(replace(self.runner.batch(places), input_ids=ids))

    def _unseen(self, row: DraftRow, drafting: bool) -> Span:
        """The tokens to catch up on: all but the draft's own that were confirmed, and the newest before drafting."""
        request = row.request
        seen = min(request.draft_computed, row.end)
        end = min(len(request.tokens) if drafting else row.end, self._max_model_len)
        request.draft_computed = max(seen, end)
        tokens, known = request.tokens[seen:end], self.runner.setup.layers.vocab_size
        if tokens and max(tokens) >= known:
            # A prompt's ids may lie in the padding of the target's embedding, which the draft's may lack.
            tokens = [token if token < known else 0 for token in tokens]
        return Span(request.blocks, seen, tokens)

    def _forward(self, batch: Batch) -> Tensor:
        hidden = run_whole(self.runner, batch).final
        return hidden
