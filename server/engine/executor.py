"""Runs a planned step on the target model: forward, logits for the rows that need them, tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.engine.batch import Span
from server.engine.models.draft import TargetHidden
from server.engine.runner import ModelRunner
from server.engine.sampling.logprobs import token_logprobs
from server.engine.sampling.request import SampleRow
from server.engine.sampling.sampler import Sampler
from server.engine.step import RowResult, StepPlan, StepRow
from server.messages import TokenLogprobs

PhaseSeconds = dict[str, list[float]]
"""Durations of a step's parts, by the phase label of /metrics."""


@dataclass(frozen=True)
class StepResult:
    """What a step made."""

    rows: list[RowResult]
    """In the plan's order."""
    hidden: TargetHidden
    """Of all the step's tokens."""


class StepExecutor:
    """Runs steps on one target model."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._sampler = Sampler()

    @torch.inference_mode()
    def execute(self, plan: StepPlan, phase_seconds: PhaseSeconds) -> StepResult:
        """Run one step; the durations of its phases are appended."""
        started = time.perf_counter()
        if plan.copies:
            self.runner.copy_blocks(plan.copies)
        batch = self.runner.batch([Span(row.request.blocks, row.start, row.token_ids) for row in plan.rows])
        hidden = self.runner.model(batch.input_ids, batch.positions, self.runner.attention.plan(batch.step))
        forwarded = time.perf_counter()
        rows = self._results(plan.rows, batch.step.query_start, hidden.final)
        phase_seconds.setdefault("target", []).append(forwarded - started)
        phase_seconds.setdefault("verify", []).append(time.perf_counter() - forwarded)
        return StepResult(rows, hidden)

    def _results(self, rows: Sequence[StepRow], query_start: list[int], hidden: Tensor) -> list[RowResult]:
        wanted = [self._sample_rows(row) for row in rows]
        # Logits only for the tokens that need them: the last of each sequence, and its drafts.
        indices = [query_start[i + 1] - len(own) + j for i, own in enumerate(wanted) for j in range(len(own))]
        sampled: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        if indices:
            chosen = hidden if len(indices) == len(hidden) else hidden[torch.tensor(indices, device=hidden.device)]
            got = self._sampler(self.runner.model.logits(chosen), [row for own in wanted for row in own])
            sampled, logprobs = got.token_ids.tolist(), got.logprobs
        results = []
        at = 0
        for i, (row, own) in enumerate(zip(rows, wanted, strict=True)):
            prompt = self._prompt_logprobs(row, hidden[query_start[i] : query_start[i + 1]])
            emitted = confirmed(row.drafts, sampled[at : at + len(own)])
            scores = [score for score in logprobs[at : at + len(emitted)] if score is not None]
            results.append(RowResult(tuple(emitted), tuple(scores), prompt))
            at += len(own)
        return results

    def _sample_rows(self, row: StepRow) -> list[SampleRow]:
        if not row.samples:
            return []
        request = row.request
        return [
            SampleRow(request.sampling, request.output, row.drafts[:assumed]) for assumed in range(len(row.drafts) + 1)
        ]

    def _prompt_logprobs(self, row: StepRow, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        """Of the prompt tokens row.start + 1 … row.end, which these hidden states predict."""
        request = row.request
        top = request.params.prompt_logprobs
        targets = request.source.prompt_token_ids[row.start + 1 : row.end + 1]
        if top is None or request.started or not targets:
            return ()
        found: list[TokenLogprobs] = []
        # By pieces: a long prompt's logits over a large vocabulary would take gigabytes.
        for at in range(0, len(targets), 256):
            piece = targets[at : at + 256]
            found += token_logprobs(self.runner.model.logits(hidden[at : at + len(piece)]), piece, top)
        return tuple(found)


def confirmed(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The tokens that a sequence gains: drafts as long as the target drew the same, then what it drew.

    Each position is sampled from the target's distribution after exactly the drafts before it, with the random number
    that plain decoding would use there. So a draft x is accepted with the target's probability of x, and the token that
    replaces a rejected one follows the target's distribution without x, renormalised: the accept/resample rule of
    Leviathan et al. 2023 (arXiv 2211.17192) for a draft that is its proposer's only choice. And a seeded answer is the
    same with and without drafts.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
        accepted += 1
    return list(sampled[: accepted + 1])
