"""The engine without processes: settings in, tokens and counts out, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from server.checkpoint.tokenizer import load_tokenizer
from server.config import Settings
from server.engine.executor import StepExecutor
from server.engine.grammar_compile import compile_grammar
from server.engine.grammar_vocabulary import GrammarVocabulary, grammar_vocabulary
from server.engine.kv.cache import KVCache
from server.engine.plan import EnginePlan, make_plan
from server.engine.request import Request
from server.engine.sampling.request import RequestSampling
from server.engine.scheduler import Scheduler, SchedulerLimits
from server.engine.start import Built, build
from server.engine.step import StepPlan
from server.messages import DraftCounts, EngineRequest, RequestOutput, SamplingParams


class SilentLink:
    """Takes progress reports and keeps none."""

    def send(self, message: object) -> None:
        pass


@dataclass
class Harness:
    """One built engine; each `run` starts with whatever the cache holds."""

    settings: Settings
    plan: EnginePlan
    built: Built
    scheduler: Scheduler
    executor: StepExecutor
    steps: list[StepPlan] = field(default_factory=list)
    outputs: dict[int, list[RequestOutput]] = field(default_factory=dict)
    ids: Any = field(default_factory=lambda: itertools.count(1))

    def add(self, prompt: Sequence[int], **params: Any) -> int:
        """Queue a request; `params` are fields of SamplingParams, greedy by default, and cache_salt or priority."""
        request_id = next(self.ids)
        options = {name: params.pop(name) for name in ("cache_salt", "priority") if name in params}
        params = {"max_tokens": 16, "seed": request_id, "temperature": 0.0} | params
        sampling = SamplingParams(**params)
        source = EngineRequest(request_id, list(prompt), sampling, arrived=float(request_id), **options)
        limit = min(self.plan.max_model_len, self.scheduler.kv.capacity)
        grammar = None
        if sampling.grammar is not None:
            grammar = compile_grammar(sampling.grammar, self.vocabulary).start(sampling.stop_token_ids)
        state = RequestSampling(sampling, prompt, self.plan.target.layers.vocab_size, grammar)
        self.scheduler.add(Request(source, state, min(len(prompt) + sampling.max_tokens, limit), list(prompt)))
        return request_id

    @cached_property
    def vocabulary(self) -> GrammarVocabulary:
        return grammar_vocabulary(load_tokenizer(self.plan.target.checkpoint), self.plan.target.layers.vocab_size)

    def step(self) -> bool:
        """One step as the engine's loop does it; False when there was nothing to do."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.steps.append(plan)
        draft = self.built.draft
        if plan.copies and draft is not None:
            draft.speculator.copy_blocks(plan.copies)
        result = self.executor.execute(plan, {})
        outputs = self.scheduler.commit(plan, result.rows)
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        if draft is None:
            self.scheduler.settle(plan)
        else:
            draft.speculator.observe(plan, outputs)
            draft.speculator.draft(plan, result.hidden, self.scheduler, {})
        self.scheduler.check()
        return True

    def run(self) -> None:
        """Until all requests have ended and every block is back."""
        for _ in range(20_000):
            if not self.step():
                assert self.scheduler.running == self.scheduler.waiting == 0
                assert self.scheduler.kv.pool.usage == 0
                return
        raise AssertionError("the engine does not come to an end")

    def generate(self, prompts: Sequence[Sequence[int]], **params: Any) -> list[list[int]]:
        """The answers of requests that come together."""
        ids = [self.add(prompt, **params) for prompt in prompts]
        self.run()
        return [self.tokens(request_id) for request_id in ids]

    def tokens(self, request_id: int) -> list[int]:
        """What a request has been answered."""
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def finish(self, request_id: int) -> str | None:
        """Why a request ended."""
        return self.outputs[request_id][-1].finish_reason

    def counts(self) -> DraftCounts:
        """What became of drafts since the engine was built."""
        return self.built.draft.speculator.counts() if self.built.draft is not None else DraftCounts()


def make_engine(model: Path | None, speculative: Mapping[str, Any] | None = None, **settings: Any) -> Harness:
    """Build an engine from `outrider serve`'s settings."""
    options: dict[str, Any] = {"model": str(model) if model else None, "dtype": "float32", "num_kv_blocks": 64}
    options |= settings
    if speculative is not None:
        options["speculative"] = {k: str(v) if isinstance(v, Path) else v for k, v in speculative.items()}
    resolved = Settings.model_validate(options)
    plan = make_plan(resolved)
    built = build(plan, SilentLink())  # type: ignore[arg-type]
    blocks = (resolved.num_kv_blocks or 64) + 1
    built.allocate(blocks)
    ahead = built.draft is not None and built.draft.speculator.proposer.last_slot_looks_ahead
    kv = KVCache(blocks, plan.block_size, resolved.enable_prefix_caching, ahead)
    limits = SchedulerLimits(
        resolved.max_num_seqs,
        plan.max_num_batched_tokens,
        resolved.enable_chunked_prefill,
        resolved.scheduling_policy == "priority",
    )
    clock: Callable[[], float] = itertools.count().__next__
    executor = StepExecutor(built.target, plan.draft.synthetic if plan.draft else None)
    return Harness(resolved, plan, built, Scheduler(limits, kv, clock), executor)
