"""Runs a planned step on the target model: forward, logits for the rows that need them, tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.engine.batch import Batch, Span
from server.engine.models.decoder import CausalLM
from server.engine.models.draft import TargetHidden
from server.engine.request import Draft
from server.engine.runner import ModelRunner, run_whole
from server.engine.sampling.grammar import GrammarError, Mask
from server.engine.sampling.logprobs import token_logprobs
from server.engine.sampling.request import SampleRow
from server.engine.sampling.sampler import Sampler, target_probabilities
from server.engine.step import RowResult, StepPlan, StepRow
from server.engine.uniform import UniformForward
from server.messages import TokenLogprobs
from server.spec.verify import DrawnDraft, SyntheticAcceptance, accept_or_resample, confirmed

_PROBABILITIES_AT_ONCE = 2**24
"""Entries of the target's distributions that are held at once: 128 MiB."""

DEVICE_LOST = torch.AcceleratorError
"""After it, no more work can be done in this process: it must end, so that its parent sees and says so."""

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

    def __init__(
        self,
        runner: ModelRunner[CausalLM],
        synthetic: SyntheticAcceptance | None = None,
        uniform: Mapping[int, UniformForward] | None = None,
    ) -> None:
        """Make an executor.

        Args:
            runner: the target's.
            synthetic: accepts drafts by lot, for benchmarks.
            uniform: captured forward passes over rows that all bring so many tokens; other steps run eagerly.
        """
        self._uniform = uniform or {}
        self.runner = runner
        self._synthetic = synthetic
        self._sampler = Sampler()

    @torch.inference_mode()
    def execute(self, plan: StepPlan, phase_seconds: PhaseSeconds) -> StepResult:
        """Run one step; the durations of its phases are appended."""
        started = time.perf_counter()
        if plan.copies:
            self.runner.copy_blocks(plan.copies)
        batch = self.runner.batch([Span(row.request.blocks, row.start, row.token_ids) for row in plan.rows])
        hidden = self._forward(batch, {row.count for row in plan.rows})
        # Before the first look at what a GPU made: grammars are followed while it works.
        positions = [_positions(row) for row in plan.rows]
        forwarded = time.perf_counter()
        rows = self._results(plan.rows, positions, batch.step.query_start, hidden.final)
        phase_seconds.setdefault("target", []).append(forwarded - started)
        phase_seconds.setdefault("verify", []).append(time.perf_counter() - forwarded)
        return StepResult(rows, hidden)

    def _forward(self, batch: Batch, counts: set[int]) -> TargetHidden:
        if len(counts) == 1:
            captured = self._uniform.get(*counts)
            if captured is not None and captured.fits(len(batch.step.seq_lens)):
                return captured.run_batch(batch)
        return run_whole(self.runner, batch)

    def _results(
        self, rows: Sequence[StepRow], positions: Sequence[_Positions], query_start: list[int], hidden: Tensor
    ) -> list[RowResult]:
        broken = _broken(query_start, hidden)
        wanted = [[] if i in broken else own.rows for i, own in enumerate(positions)]
        # Logits only for the tokens that need them: the last of each sequence, and its drafts.
        indices = [query_start[i + 1] - len(own) + j for i, own in enumerate(wanted) for j in range(len(own))]
        logits = hidden.new_empty(0, 0)
        sampled: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        if indices:
            chosen = hidden if len(indices) == len(hidden) else hidden[torch.tensor(indices, device=hidden.device)]
            sample_rows = [row for own in wanted for row in own]
            best = self._best(chosen, rows, sample_rows)
            if best is not None:
                sampled, logprobs = best, [None] * len(best)
            else:
                logits = self.runner.model.logits(chosen)
                got = self._sampler(logits, sample_rows)
                sampled, logprobs = got.token_ids.tolist(), got.logprobs
        gained = self._gained(rows, wanted, logits, sampled)
        results = []
        at = 0
        for i, (row, own, emitted) in enumerate(zip(rows, wanted, gained, strict=True)):
            to = at + len(own)
            if i in broken:
                results.append(RowResult(broken=True))
                continue
            prompt = self._prompt_logprobs(row, hidden[query_start[i] : query_start[i + 1]])
            stuck = positions[i].stuck if len(emitted) > positions[i].free else None
            if stuck is not None:
                emitted = emitted[: positions[i].free]
            scores = _rescored(row, emitted, logits[at:to], sampled[at:to], logprobs[at:to])
            results.append(RowResult(tuple(emitted), scores, prompt, stuck=stuck))
            at = to
        return results

    def _best(self, hidden: Tensor, rows: Sequence[StepRow], sample_rows: Sequence[SampleRow]) -> list[int] | None:
        """The tokens, where nothing but the most probable one of each row is asked for and the head finds it alone."""
        if any(row.drafts and row.request.draft.probabilities is not None for row in rows):
            return None
        if not all(row.plainly_greedy for row in sample_rows):
            return None
        best = self.runner.model.best(hidden, sample_rows[0].request.vocab_size)
        return None if best is None else best.tolist()

    def _gained(
        self, rows: Sequence[StepRow], wanted: list[list[SampleRow]], logits: Tensor, sampled: list[int]
    ) -> list[list[int]]:
        """The tokens that each row's sequence gains."""
        gained: list[list[int]] = []
        drawn: dict[int, tuple[int, DrawnDraft]] = {}
        at = 0
        for i, (row, own) in enumerate(zip(rows, wanted, strict=True)):
            request, got = row.request, sampled[at : at + len(own)]
            if self._synthetic is not None and row.drafts:
                gained.append(self._synthetic.confirmed(request, row.drafts, got))
            else:
                gained.append(confirmed(row.drafts, got))
                if row.drafts and request.draft.probabilities is not None:
                    # The step may have taken fewer drafts than were proposed.
                    kept = Draft(row.drafts, request.draft.probabilities[: len(row.drafts)])
                    drawn[i] = at, DrawnDraft(request, kept, got)
            at += len(own)
        most = max(1, _PROBABILITIES_AT_ONCE // max(1, logits.shape[1] * max(map(len, wanted))))
        members = list(drawn)
        for some in (members[first : first + most] for first in range(0, len(members), most)):
            indices = [drawn[i][0] + j for i in some for j in range(len(wanted[i]))]
            chosen = logits if len(indices) == len(logits) else logits[torch.tensor(indices, device=logits.device)]
            target = target_probabilities(chosen, [one for i in some for one in wanted[i]])
            for i, tokens in zip(some, accept_or_resample([drawn[i][1] for i in some], target), strict=True):
                gained[i] = tokens
        return gained

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


@dataclass(frozen=True)
class _Positions:
    """Where a step row samples."""

    rows: list[SampleRow]
    """After none of its drafts, after the first, and so on."""
    free: int
    """Leading ones that have a token to choose."""
    stuck: str | None = None
    """Why the one after those has none."""


def _positions(row: StepRow) -> _Positions:
    if not row.samples:
        return _Positions([], 0)
    sampling, output = row.request.sampling, row.request.output
    drafts = [row.drafts[:assumed] for assumed in range(len(row.drafts) + 1)]
    if sampling.grammar is None:
        return _Positions([SampleRow(sampling, output, draft) for draft in drafts], len(drafts))
    masks: list[Mask | None] = []
    stuck = None
    for draft in drafts:
        try:
            masks.append(sampling.mask(output, draft))
        except GrammarError as error:
            stuck = str(error)
            break
    # What is sampled where the grammar is stuck counts for nothing.
    padded = [*masks, *[None] * (len(drafts) - len(masks))]
    rows = [SampleRow(sampling, output, draft, mask) for draft, mask in zip(drafts, padded, strict=True)]
    return _Positions(rows, len(masks), stuck)


def _broken(query_start: list[int], hidden: Tensor) -> set[int]:
    """Rows that hold NaN or infinity, as float16 makes them of numbers that it cannot hold."""
    # One number tells nearly always: where it is finite, so is all that was added up in it.
    if math.isfinite(float(hidden.sum(dtype=torch.float32))):
        return set()
    tokens = hidden.isfinite().all(-1).tolist()
    return {i for i in range(len(query_start) - 1) if not all(tokens[query_start[i] : query_start[i + 1]])}


def _rescored(
    row: StepRow, emitted: list[int], logits: Tensor, sampled: list[int], scores: list[TokenLogprobs | None]
) -> tuple[TokenLogprobs, ...]:
    """The emitted tokens' log-probabilities; those of tokens that were not sampled here are looked up."""
    top = row.request.params.logprobs
    if top is None:
        return ()
    found = []
    for i, token_id in enumerate(emitted):
        score = scores[i]
        if score is None or token_id != sampled[i]:
            (score,) = token_logprobs(logits[i : i + 1], [token_id], top)
        found.append(score)
    return tuple(found)
