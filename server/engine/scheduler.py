"""Continuous batching: which requests get how many tokens of the next step. Plans steps, touches no tensor."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from server.engine.kv.cache import KVCache
from server.engine.request import NO_DRAFT, Draft, Request
from server.engine.step import BlockCopy, DraftRow, RowResult, StepPlan, StepRow
from server.messages import FinishReason, RequestOutput

NOT_FINITE = (
    "The model made numbers of this request that are not finite (NaN or infinity). In float16 that is often overflow: "
    "serve it with --dtype bfloat16 or float32."
)


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
    """Owns all live requests. A step is `schedule`, `commit`, `draft_rows` and `settle`, in turn."""

    def __init__(self, limits: SchedulerLimits, kv: KVCache, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.kv = kv
        self.preemptions = 0
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._running: list[Request] = []
        self._waiting: list[tuple[tuple[int, float, int], Request]] = []
        self._ended: list[Request] = []
        self._spoiled: list[int] = []

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
        """End the requests of a step that could not be run, or not be settled."""
        for request in self._ended:
            self.kv.release(request)
        self._ended = []
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
        self.kv.pool.check(request.blocks for request in (*self._requests.values(), *self._ended))

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do.

        Decoding requests come first, one token each, then prompts under way, then new ones while blocks, places and
        the token budget last. When a running request finds no block, the one that would run last gives up its own
        and waits to be computed again.
        """
        budget = self.limits.max_num_batched_tokens
        preemptions = self.preemptions
        rows: list[StepRow] = []
        # Sorted so that the last is the first to give way.
        self._running.sort(key=self._order)
        decodes = [request for request in self._running if request.remaining == 1]
        prompts = [request for request in self._running if request.remaining > 1]
        # Each gets its token before any gets drafts, and drafts leave prompts a part of the step.
        spare = max(0, budget - len(decodes))
        if prompts or self.waiting:
            spare //= 2
        for request in (*decodes, *prompts):
            if budget == 0:
                break
            if not request.blocks:
                continue  # gave way to an earlier one in this very loop
            drafts = request.draft.token_ids[:spare]
            count = self._count(request, budget)
            if count and self._make_room(request, request.computed + count):
                if drafts and not self.kv.grow(request, request.computed + count + len(drafts)):
                    drafts = ()  # no reason to preempt anyone
                rows.append(self._row(request, count, drafts))
                budget -= count + len(drafts)
                spare -= len(drafts)
        rows = [row for row in rows if row.request.blocks]
        copies: list[BlockCopy] = []
        if self.preemptions == preemptions:
            for row, copied in self._admissions(budget):
                rows.append(row)
                copies += copied
        return StepPlan(tuple(rows), tuple(copies)) if rows else None

    def ahead(self, per_step: int, drafts: int) -> list[Request] | None:
        """The requests of a step that can be launched while the last one is under way, with room for its tokens.

        Args:
            per_step: tokens that a step makes of a sequence at most.
            drafts: tokens that are drafted after it.

        Returns:
            All running requests but those that end with what is under way; None when `schedule` must decide, with all
            results at hand: a prompt is to be computed, or a block is lacking.
        """
        if self.waiting and len(self._running) < self.limits.max_num_seqs:
            return None
        if len(self._running) * per_step > self.limits.max_num_batched_tokens:
            return None
        requests = []
        for request in self._running:
            if not request.started or not request.in_flight and request.remaining != 1:
                return None
            under_way = len(request.tokens) + request.in_flight * per_step
            if len(request.tokens) + request.in_flight >= request.max_len:
                continue
            if not self.kv.grow(request, under_way + per_step + drafts):
                return None
            requests.append(request)
        return requests

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

    def _row(self, request: Request, count: int, drafts: tuple[int, ...] = ()) -> StepRow:
        completes = count == request.remaining
        return StepRow(request, request.computed, count + len(drafts), completes, drafts)

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
        request.draft = NO_DRAFT
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
        """Take over what a step computed; `results` stands in the order of the plan's rows.

        Rows of requests that are gone by now are passed over. Requests that end keep their blocks until `settle`: the
        draft model may have to write the step's tokens too.
        """
        outputs = []
        for row, result in zip(plan.rows, results, strict=True):
            request = row.request
            if self._requests.get(request.request_id) is not request:
                continue
            request.draft = NO_DRAFT
            if result.broken:
                outputs.append(self._give_up(row))
                continue
            request.computed = row.end - len(row.drafts) + result.accepted
            if result.prompt_logprobs:
                request.prompt_logprobs = [*(request.prompt_logprobs or [None]), *result.prompt_logprobs]
            if row.completes:
                outputs.append(self._advance(row, result))
        return outputs

    def draft_rows(self, plan: StepPlan, wanted: Callable[[Request], int]) -> tuple[DraftRow, ...]:
        """The committed step as a proposer sees it, with room in the cache for what each row may draft.

        Args:
            plan: the step.
            wanted: how many tokens to draft for a request, were there no limit.
        """
        rows = []
        first = 0
        for row in plan.rows:
            request = row.request
            limit = 0
            if row.samples and request.request_id in self._requests:
                # The last token of the sequence is never a draft: after k drafts the target adds one of its own.
                limit = max(0, min(wanted(request), request.max_len - len(request.tokens) - 1))
                if limit and not self.kv.grow(request, len(request.tokens) + limit):
                    limit = max(0, len(request.blocks) * self.kv.block_size - len(request.tokens))
            rows.append(DraftRow(request, row.start, request.computed, first, limit))
            first += row.count
        return tuple(rows)

    def settle(self, plan: StepPlan, rows: Iterable[DraftRow] = (), drafts: Iterable[Draft] = ()) -> None:
        """End the step: full blocks become findable, drafts stand ready, ended requests give their blocks back."""
        for planned in plan.rows:
            self.kv.register(planned.request)
        for row, draft in zip(rows, drafts, strict=True):
            if row.limit:
                row.request.draft = row.request.grammatical(draft)
        for request in self._ended:
            self.kv.release(request)
        self._ended = []

    def _end(self, request: Request) -> None:
        """No more steps; the blocks follow in `settle`."""
        del self._requests[request.request_id]
        self._running.remove(request)
        self._ended.append(request)

    def _give_up(self, row: StepRow) -> RequestOutput:
        """End a request whose numbers went wrong; what it wrote must reach nobody, not even as masked padding."""
        request = row.request
        request.computed = row.start
        self._spoiled += request.blocks[row.start // self.kv.block_size :]
        self._end(request)
        return RequestOutput(request.request_id, [], finish_reason="error", error=NOT_FINITE)

    def take_spoiled(self) -> list[int]:
        """Blocks to be overwritten with zeros before anyone gets them."""
        spoiled, self._spoiled = self._spoiled, []
        return spoiled

    def _advance(self, row: StepRow, result: RowResult) -> RequestOutput:
        request = row.request
        params = request.params
        room = request.max_len - len(request.tokens)
        finish: FinishReason | None = None
        stop_token_id: int | None = None
        kept = 0
        for token_id in result.token_ids:
            kept += 1
            request.tokens.append(token_id)
            request.output.append(token_id)
            # Below min_tokens the sampler bans stop ids, unless nothing else is left to choose.
            if token_id in params.stop_token_ids and len(request.output) >= params.min_tokens:
                finish, stop_token_id = "stop", token_id
                break
            grammar = request.sampling.grammar
            if grammar is not None and grammar.ended(request.output):
                # Whatever min_tokens says: the grammar leaves nothing to add.
                finish = "stop"
                stop_token_id = token_id if token_id in grammar.end_ids else None
                break
            if len(request.tokens) >= request.max_len:
                break
        if finish is None and len(request.tokens) >= request.max_len:
            finish = "length"
        error = result.stuck if finish is None else None
        if error is not None:
            finish = "error"
        first = not request.started
        request.started = True
        prompt_logprobs = None
        if first and params.prompt_logprobs is not None:
            prompt_logprobs = request.prompt_logprobs or [None]
            request.prompt_logprobs = None
        if finish is not None:
            # Tokens beyond the end were computed for nothing and are no part of the sequence.
            request.computed = min(request.computed, len(request.tokens))
            self._end(request)
        # What lies beyond the end of the sequence counts neither as drafted nor as accepted. (A step that was launched
        # before the last one's tokens were known may have verified drafts beyond max_len.)
        counted = min(len(row.drafts), room if finish is None else kept)
        return RequestOutput(
            request.request_id,
            list(result.token_ids[:kept]),
            logprobs=list(result.logprobs[:kept]) if params.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish,
            stop_token_id=stop_token_id,
            error=error,
            request_at_fault=error is not None,
            cached_tokens=(request.cached_tokens or 0) if first else 0,
            first_scheduled=request.first_scheduled if first else 0.0,
            drafted=counted,
            accepted=min(result.accepted, counted),
        )
