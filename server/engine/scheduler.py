"""Continuous batching: which requests get how many tokens of the next step. Plans steps, touches no tensor."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from server.engine.kv.cache import KVCache
from server.engine.request import Request
from server.engine.step import BlockCopy, RowResult, StepPlan, StepRow
from server.messages import FinishReason, RequestOutput


@dataclass(frozen=True)
class SchedulerLimits:
    """What a step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    """Off: a prompt enters a step whole or waits."""
    use_priority: bool
    """Order by the requests' priority before their arrival."""


class Scheduler:
    """Owns all live requests. One call of `schedule`, one of `commit`, in turn."""

    def __init__(self, limits: SchedulerLimits, kv: KVCache, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.kv = kv
        self.preemptions = 0
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._running: list[Request] = []
        self._waiting: list[tuple[tuple[int, float, int], Request]] = []

    @property
    def running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that hold none."""
        return len(self._requests) - len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._requests[request.request_id] = request
        heapq.heappush(self._waiting, (self._order(request), request))

    def abort(self, request_ids: Iterable[int]) -> None:
        """Forget requests, whatever their state; unknown ids have just ended."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._remove(request)

    def fail(self, plan: StepPlan, message: str) -> list[RequestOutput]:
        """End the requests of a step that could not be run."""
        outputs = []
        for row in plan.rows:
            request = row.request
            if request.request_id in self._requests:
                self._remove(request)
                outputs.append(RequestOutput(request.request_id, [], finish_reason="error", error=message))
        return outputs

    def check(self) -> None:
        """Account for every block.

        Raises:
            RuntimeError: see `BlockPool.check`.
        """
        self.kv.pool.check(request.blocks for request in self._requests.values())

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do.

        Decoding requests come first, one token each, then prompts under way, then new ones while blocks, places and
        the token budget last. When a running request finds no block, the one that would run last gives up its own
        and waits to be computed again.
        """
        budget = self.limits.max_num_batched_tokens
        preemptions = self.preemptions
        rows: list[StepRow] = []
        # Sorted so that the last is the first to give way; decodes before longer rows, whatever came first.
        self._running.sort(key=self._order)
        for request in sorted(self._running, key=lambda r: r.remaining > 1):
            if budget == 0:
                break
            if not request.blocks:
                continue  # gave way to an earlier one in this very loop
            count = self._count(request, budget)
            if count and self._make_room(request, request.computed + count):
                rows.append(self._row(request, count))
                budget -= count
        rows = [row for row in rows if row.request.blocks]
        copies: list[BlockCopy] = []
        if self.preemptions == preemptions:
            for row, copied in self._admissions(budget):
                rows.append(row)
                copies += copied
        return StepPlan(tuple(rows), tuple(copies)) if rows else None

    def _admissions(self, budget: int) -> Iterator[tuple[StepRow, tuple[BlockCopy, ...]]]:
        while self._waiting and budget and len(self._running) < self.limits.max_num_seqs:
            request = self._waiting[0][1]
            if self._requests.get(request.request_id) is not request:
                heapq.heappop(self._waiting)  # aborted while it waited
                continue
            copies = self.kv.admit(request)
            if copies is None:
                return
            count = self._count(request, budget)
            if count == 0:
                self.kv.release(request)
                return
            heapq.heappop(self._waiting)
            self._running.append(request)
            if request.cached_tokens is None:
                request.cached_tokens = min(request.computed, request.num_prompt)
                request.first_scheduled = self._clock()
            budget -= count
            yield self._row(request, count), copies

    def _order(self, request: Request) -> tuple[int, float, int]:
        priority = request.source.priority if self.limits.use_priority else 0
        return (priority, request.source.arrived, request.request_id)

    def _count(self, request: Request, budget: int) -> int:
        if request.remaining > budget and not self.limits.enable_chunked_prefill:
            return 0
        return min(request.remaining, budget)

    def _row(self, request: Request, count: int) -> StepRow:
        return StepRow(request, request.computed, count, completes=count == request.remaining)

    def _make_room(self, request: Request, tokens: int) -> bool:
        while not self.kv.grow(request, tokens):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self.kv.release(request)
        if not request.started:
            request.prompt_logprobs = None
        heapq.heappush(self._waiting, (self._order(request), request))
        self.preemptions += 1

    def _remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        if request.blocks:
            self._running.remove(request)
            self.kv.release(request)

    def commit(self, plan: StepPlan, results: list[RowResult]) -> list[RequestOutput]:
        """Take over what a step computed; `results` stands in the order of the plan's rows."""
        outputs = []
        for row, result in zip(plan.rows, results, strict=True):
            request = row.request
            if self._requests.get(request.request_id) is not request:
                continue  # aborted while the step ran
            request.computed = row.end
            self.kv.register(request)
            if result.prompt_logprobs:
                request.prompt_logprobs = [*(request.prompt_logprobs or [None]), *result.prompt_logprobs]
            if row.completes:
                outputs.append(self._advance(request, result))
        return outputs

    def _advance(self, request: Request, result: RowResult) -> RequestOutput:
        token_ids: list[int] = []
        finish: FinishReason | None = None
        stop_token_id: int | None = None
        if result.token_id is not None:
            token_ids.append(result.token_id)
            request.tokens.append(result.token_id)
            request.output.append(result.token_id)
            # Below min_tokens the sampler bans stop ids, unless nothing else is left to choose.
            if result.token_id in request.params.stop_token_ids and len(request.output) >= request.params.min_tokens:
                finish, stop_token_id = "stop", result.token_id
        if finish is None and len(request.tokens) >= request.max_len:
            finish = "length"
        first = not request.started
        request.started = True
        prompt_logprobs = None
        if first and request.params.prompt_logprobs is not None:
            prompt_logprobs = request.prompt_logprobs or [None]
            request.prompt_logprobs = None
        if finish is not None:
            self._remove(request)
        return RequestOutput(
            request.request_id,
            token_ids,
            logprobs=[result.logprobs] if result.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish,
            stop_token_id=stop_token_id,
            cached_tokens=(request.cached_tokens or 0) if first else 0,
            first_scheduled=request.first_scheduled if first else 0.0,
        )
