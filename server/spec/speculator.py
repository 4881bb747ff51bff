"""Drafting after a step: who may draft how much, the drafts themselves, and the count of what became of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from server.engine.models.draft import TargetHidden
from server.engine.request import Request
from server.engine.scheduler import Scheduler
from server.engine.step import BlockCopy, StepPlan
from server.messages import DraftCounts, RequestOutput
from server.spec.base import Proposer
from server.spec.counts import AcceptanceCounter
from server.spec.length import DraftLength


class DraftCache(Protocol):
    """The draft's part of the KV cache, over the target's block tables."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks; all are read before any is written."""


@dataclass
class _Cycle:
    """A draft and the step that checks it: from drafting to drafting."""

    began: float
    """Of `time.perf_counter`."""
    running: int
    length: int
    requests: frozenset[int]
    """Those that the checking step must have, all of them and no others, for its time to tell anything."""
    tokens: float = 0.0
    """That the checking step was expected to make."""


class Speculator:
    """Joins a proposer with the rule for k and the counters."""

    def __init__(self, proposer: Proposer, cache: DraftCache | None, length: DraftLength, max_tokens: int) -> None:
        """Make a speculator.

        Args:
            proposer: makes the drafts.
            cache: the proposer's, if it keeps one.
            length: how many tokens each request gets.
            max_tokens: k, the longest draft.
        """
        self.proposer = proposer
        self._cache = cache
        self._length = length
        self._counter = AcceptanceCounter(max_tokens)
        self._cycle: _Cycle | None = None

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of the draft's cache before a step writes."""
        if self._cache is not None:
            self._cache.copy_blocks(copies)

    def observe(self, plan: StepPlan, outputs: Sequence[RequestOutput]) -> None:
        """Count the drafts that a committed step verified."""
        self._counter.add(outputs)
        requests = {row.request.request_id: row.request for row in plan.rows}
        for output in outputs:
            self._length.observe(requests[output.request_id], output)
        if self._cycle is not None:
            self._cycle.tokens += sum(map(self._length.expected, outputs))

    def wanted(self, request: Request, running: int) -> int:
        """Tokens to draft for a request while so many run, were there no other limit."""
        wanted, most = self._length.wanted(request, running), request.params.most_drafted
        return wanted if most is None else min(wanted, most)

    def draft(
        self,
        plan: StepPlan,
        hidden: TargetHidden,
        scheduler: Scheduler,
        phase_seconds: dict[str, list[float]],
    ) -> None:
        """Draft for the next step, and settle this one."""
        started = time.perf_counter()
        self._learn(plan, started)
        running = scheduler.running
        most = self._length.most(running)

        def limit(request: Request) -> int:
            return min(most, self.wanted(request, running))

        rows = scheduler.draft_rows(plan, limit)
        drafting = most > 0 and any(limit(row.request) for row in rows)
        drafts = self.proposer.propose(rows, hidden) if drafting else self.proposer.rest(rows, hidden)
        scheduler.settle(plan, rows, drafts)
        decoding = frozenset(row.request.request_id for row in plan.rows if row.samples)
        if decoding:
            self._counter.chose(most)
        # Where requests themselves ask for less, a cycle says nothing of what the length is worth.
        asked = (row.request.params.most_drafted for row in plan.rows)
        free = all(count is None or count >= most for count in asked)
        self._cycle = _Cycle(started, running, most, decoding) if free else None
        phase_seconds.setdefault("draft", []).append(time.perf_counter() - started)

    def counts(self) -> DraftCounts:
        """Totals since the start."""
        return self._counter.snapshot()

    def _learn(self, plan: StepPlan, now: float) -> None:
        """Hand the last cycle's figures on, if the step did nothing else."""
        cycle = self._cycle
        if cycle is not None and cycle.requests == {row.request.request_id for row in plan.rows}:
            self._length.learn(cycle.running, cycle.length, cycle.tokens, now - cycle.began)
