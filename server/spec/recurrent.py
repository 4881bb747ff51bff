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
from server.engine.runner import ModelRunner, run_head
from server.engine.step import DraftRow
from server.spec.chain import draft_chain
from server.spec.choice import DraftChoice
from server.spec.rested_states import RestedStates


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
        self._rested = RestedStates()

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], hidden: TargetHidden) -> list[Draft]:
        """See `Proposer.propose`."""
        drafts = [NO_DRAFT] * len(rows)
        limits = [min(row.limit, max(0, self._max_model_len - len(row.request.tokens))) for row in rows]
        order = sorted((i for i in range(len(rows)) if self._kept(rows[i])), key=lambda i: -limits[i])
        if not order:
            return drafts
        first = [self._rested.begin(rows[i]) for i in order]
        spans = [self._span(rows[i], begin) for i, begin in zip(order, first, strict=True)]
        batch = self.runner.batch(spans)
        made = self._forward(self._model.combine(self._hidden([rows[i] for i in order], hidden)), batch, 0)
        live = [i for i in order if limits[i]]
        last = torch.tensor(
            [end - 1 for end in batch.step.query_start[1 : len(live) + 1]], dtype=torch.int64, device=made.output.device
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
            [rows[i] for i in live],
            [limits[i] for i in live],
            made.output[last],
            self._pick,
            run,
        )
        for i, draft in zip(live, chain, strict=True):
            drafts[i] = draft
        return drafts

    @torch.inference_mode()
    def rest(self, rows: Sequence[DraftRow], hidden: TargetHidden) -> list[Draft]:
        """See `Proposer.rest`: hidden states of decoded tokens are kept, for the head to take in when it drafts again.

        Blocks that reach the prefix cache meanwhile lack the head's part: a later request that finds them drafts worse.
        """
        late: list[DraftRow] = []
        resting: list[tuple[DraftRow, int]] = []
        for row in rows:
            count = self._kept(row)
            if row.in_prompt or self._rested.is_full(row):
                late.append(replace(row, limit=0))
            elif count:
                resting.append((row, count))
        if late:
            self.propose(late, hidden)
        if resting:
            self._rested.keep(resting, self._copied(resting, hidden))
        return [NO_DRAFT] * len(rows)

    def _copied(self, resting: Sequence[tuple[DraftRow, int]], hidden: TargetHidden) -> TargetHidden:
        """The hidden states of these tokens, for the next step to leave alone: on a CPU each makes new ones anyway."""
        if hidden.final.is_cpu and sum(count for _, count in resting) == len(hidden.final):
            return hidden
        return hidden.select(self._places(resting))

    def _hidden(self, rows: Sequence[DraftRow], hidden: TargetHidden) -> TargetHidden:
        """Of the tokens that the head takes in, those that it rested over before the step's."""
        chosen = hidden.select(self._places([(row, self._kept(row)) for row in rows]))
        rested = [self._rested.take(row) for row in rows]
        if not any(rested):
            return chosen
        parts: list[TargetHidden] = []
        at = 0
        for row, before in zip(rows, rested, strict=True):
            parts += before
            to = at + self._kept(row)
            parts.append(TargetHidden(chosen.final[at:to], None if chosen.aux is None else chosen.aux[at:to]))
            at = to
        aux = [part.aux for part in parts if part.aux is not None]
        return TargetHidden(torch.cat([part.final for part in parts]), torch.cat(aux) if aux else None)

    def _places(self, rows: Sequence[tuple[DraftRow, int]]) -> Tensor:
        """Where the tokens that the head takes in, so many of each row, are among the step's."""
        taken = [range(row.first, row.first + count) for row, count in rows]
        return torch.tensor([i for indices in taken for i in indices], device=self.runner.setup.device)

    def _forward(self, hidden: Tensor, batch: Batch, step: int) -> DraftHidden:
        return run_head(self.runner, hidden, batch, step)

    def _kept(self, row: DraftRow) -> int:
        """Tokens of the step that the head takes in: those kept, whose next token is known, within its positions."""
        return max(0, min(row.end, len(row.request.tokens) - 1, self._max_model_len) - row.start)

    def _span(self, row: DraftRow, begin: int) -> Span:
        following = row.request.tokens[begin + 1 : row.start + 1 + self._kept(row)]
        return Span(row.request.blocks, begin, following)

    def _pick(self, output: Tensor, rows: Sequence[DraftRow], ahead: int) -> tuple[Tensor, Tensor | None]:
        if not self._choice.probabilistic:
            return self._model.highest(output, self._vocab_size), None
        return self._choice.draw(self._logits(output), [row.request for row in rows], ahead)

    def _logits(self, output: Tensor) -> Tensor:
        """[R, V] over the target's vocabulary; what the head does not know is never drafted."""
        logits = self._model.logits(output)
        ids = self._model.target_ids
        if ids is None:
            return logits[:, : self._vocab_size]
        spread = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return spread.index_copy_(1, ids, logits)
