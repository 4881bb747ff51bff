"""From settings to a running engine: plan, build, read back, size, warm up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from server.checkpoint.tokenizer import TokenizerFiles, load_tokenizer
from server.config import Settings
from server.engine.core import EngineCore
from server.engine.cpu.threads import set_threads
from server.engine.execution import ExecutionNeed, graph_bytes, make_execution
from server.engine.executor import StepExecutor
from server.engine.grammar_compile import GrammarCompiler
from server.engine.grammar_vocabulary import grammar_vocabulary
from server.engine.kv.cache import KVCache
from server.engine.kv.sizing import KVBudget, num_kv_blocks
from server.engine.link import Link
from server.engine.models.decoder import CausalLM
from server.engine.plan import EnginePlan, kv_group_rows, make_plan
from server.engine.readback import read_back
from server.engine.request import Request
from server.engine.run_ahead import Drafting
from server.engine.runner import ModelRunner, build_target
from server.engine.sampling.request import RequestSampling
from server.engine.scheduler import Scheduler, SchedulerLimits
from server.engine.step import DraftRow, StepPlan, StepRow
from server.errors import UserError
from server.messages import (
    EngineReady,
    EngineRequest,
    LoadedModel,
    Progress,
    ResolvedRow,
    SamplingParams,
    SpeculativeInfo,
)
from server.spec.build import BuiltDraft, build_draft
from server.spec.draft_plan import DraftPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """All that the plan named, built, filled and compared with the plan."""

    target: ModelRunner[CausalLM]
    draft: BuiltDraft | None
    rows: list[ResolvedRow]
    models: list[LoadedModel]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all models."""
        return sum(runner.block_bytes for runner in self._runners)

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache of all models."""
        for runner in self._runners:
            runner.allocate(num_blocks)

    @property
    def _runners(self) -> list[ModelRunner[Any]]:
        draft = self.draft.runner if self.draft else None
        return [self.target] if draft is None else [self.target, draft]


@dataclass(frozen=True)
class StartedEngine:
    """A running engine, and what it was made of."""

    core: EngineCore
    plan: EnginePlan
    built: Built


def start_engine(settings: Settings, link: Link) -> StartedEngine:
    """Build everything and tell the API process.

    Raises:
        UserError: for a reason that the user can act on.
    """
    started = time.monotonic()
    set_threads(settings.cpu_threads)
    plan = make_plan(settings)
    built = build(plan, link)
    sampled_vocab_size = _sampled_vocab_size(settings, plan)
    need = _execution_need(settings, plan, built, sampled_vocab_size)
    blocks = _kv_blocks(settings, plan, built, need)
    built.allocate(blocks)
    looks_ahead = built.draft is not None and built.draft.speculator.proposer.last_slot_looks_ahead
    kv = KVCache(blocks, plan.block_size, settings.enable_prefix_caching, looks_ahead)
    max_model_len = _fitting_length(settings, plan, kv.capacity)
    draft_runner = built.draft.runner if built.draft is not None else None
    execution = make_execution(built.target, draft_runner, replace(need, max_model_len=max_model_len))
    executor = StepExecutor(built.target, plan.draft.synthetic if plan.draft else None, execution.uniform)
    _warm_up(executor, built.draft)
    execution.capture(_progress(link, "capturing graphs"))
    limits = SchedulerLimits(
        settings.max_num_seqs,
        plan.max_num_batched_tokens,
        settings.enable_chunked_prefill,
        settings.scheduling_policy == "priority",
    )
    core = EngineCore(
        link,
        Scheduler(limits, kv),
        executor,
        built.draft.speculator if built.draft else None,
        GrammarCompiler(lambda: grammar_vocabulary(_tokenizer(settings, plan), sampled_vocab_size)),
        plan.target.layers.vocab_size,
        sampled_vocab_size,
        max_model_len,
        execution.run_ahead,
    )
    link.send(
        EngineReady(
            rows=built.rows,
            kv_groups=kv_group_rows(plan, kv.pool.usable),
            models=built.models,
            max_model_len=max_model_len,
            kv_bytes=blocks * built.block_bytes,
            device=str(plan.target.device),
            load_seconds=time.monotonic() - started,
            vocab_size=plan.target.layers.vocab_size,
            speculative=_speculative(plan.draft),
        )
    )
    return StartedEngine(core, plan, built)


def build(plan: EnginePlan, link: Link) -> Built:
    """Build what the plan names, and compare.

    Raises:
        UserError: weights that do not fit, or a layer that holds something else than planned.
    """
    capture = plan.draft.capture if plan.draft else ()
    target = build_target(plan.target, plan.pages("target"), capture, _progress(link, "loading weights"))
    rows, model = read_back(target)
    models = [model]
    draft = None
    if plan.draft is not None:
        pages = plan.pages("draft") if plan.draft.setup is not None else plan.pages("target")
        draft = build_draft(plan.draft, pages, target.model, _progress(link, "loading the draft's weights"))
        if draft.runner is not None:
            draft_rows, draft_model = read_back(draft.runner, plan.draft.method)
            models.append(draft_model)
            rows += draft_rows
        rows += [ResolvedRow(r.role, r.component, r.requested, r.resolved, r.source, r.why) for r in plan.draft.rows]
    return Built(target, draft, rows, models)


def _sampled_vocab_size(settings: Settings, plan: EnginePlan) -> int:
    """Ids that may be sampled: an embedding's padding rows mean nothing, and random weights would choose them."""
    try:
        files = _tokenizer(settings, plan)
    except UserError:
        return plan.target.layers.vocab_size  # the API process says what is wrong with the tokenizer
    known = max(files.tokenizer.get_vocab().values(), default=-1) + 1
    return min(plan.target.layers.vocab_size, known)


def _tokenizer(settings: Settings, plan: EnginePlan) -> TokenizerFiles:
    folder = Path(settings.download_dir) if settings.download_dir else None
    return load_tokenizer(plan.target.checkpoint, settings.tokenizer, download_dir=folder)


def _speculative(draft: DraftPlan | None) -> SpeculativeInfo | None:
    if draft is None:
        return None
    return SpeculativeInfo(
        method=draft.method,
        num_speculative_tokens=draft.num_tokens,
        adaptive=draft.adaptive,
        synthetic=draft.synthetic is not None,
        draft_sample_method="probabilistic" if draft.probabilistic else "greedy",
    )


def _progress(link: Link, stage: str) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        link.send(Progress(stage, done, total))

    return report


def _execution_need(settings: Settings, plan: EnginePlan, built: Built, sampled_vocab_size: int) -> ExecutionNeed:
    drafting = None
    if plan.draft is not None and built.draft is not None and built.draft.on_device is not None:
        k, synthetic = plan.draft.num_tokens, plan.draft.synthetic
        drafting = Drafting(built.draft.on_device, k, plan.draft.max_model_len, synthetic)
    return ExecutionNeed(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=plan.max_model_len,
        sampled_vocab_size=sampled_vocab_size,
        drafted=plan.draft.num_tokens if plan.draft is not None else 0,
        drafting=drafting,
        capture=not settings.enforce_eager,
    )


def _kv_blocks(settings: Settings, plan: EnginePlan, built: Built, need: ExecutionNeed) -> int:
    budget = KVBudget(settings.num_kv_blocks, settings.kv_cache_memory, settings.gpu_memory_utilization)
    device = plan.target.device
    captured = 0
    if device.type == "cuda":
        captured = graph_bytes(
            plan.target.layers, plan.target.dtype, need, len(plan.draft.capture) if plan.draft else 0
        )
        # The largest step, over a cache just large enough for it, shows the peak beside the weights.
        built.allocate(plan.max_num_batched_tokens // plan.block_size + 2)
        torch.cuda.reset_peak_memory_stats(device)
        _run_prompt(StepExecutor(built.target), built.draft, plan.max_num_batched_tokens)
        torch.cuda.synchronize(device)
        built.allocate(2)
        torch.cuda.empty_cache()
    return num_kv_blocks(
        budget, device, built.block_bytes, plan.block_size, plan.max_model_len, settings.max_num_seqs, captured
    )


def _fitting_length(settings: Settings, plan: EnginePlan, capacity: int) -> int:
    """The context length that one sequence can really have, so that any admitted request can be finished."""
    if capacity >= plan.max_model_len:
        return plan.max_model_len
    if settings.max_model_len is not None:
        raise UserError(
            f"--max-model-len {settings.max_model_len}: the KV cache holds {capacity} tokens. "
            f"Use at most {capacity}, or give the cache more with --kv-cache-memory or --num-kv-blocks."
        )
    logger.warning(
        "context length lowered from %d to %d tokens, all that the KV cache holds", plan.max_model_len, capacity
    )
    return capacity


def _warm_up(executor: StepExecutor, draft: BuiltDraft | None) -> None:
    """A prompt and a decode, so that the first request does not pay for what torch sets up once."""
    length = executor.runner.pages.block_size
    _run_prompt(executor, draft, length - 2)
    _run_prompt(executor, draft, 1, start=length - 2)


def _run_prompt(executor: StepExecutor, draft: BuiltDraft | None, count: int, start: int = 0) -> None:
    tokens = [0] * (start + count)
    params = SamplingParams(max_tokens=2, seed=0, temperature=0.0)
    runner = executor.runner
    request = Request(
        EngineRequest(0, tokens, params, 0.0),
        RequestSampling(params, tokens, runner.setup.layers.vocab_size),
        max_len=start + count + 2,
        tokens=tokens,
        # The draft takes in the token after the prompt, too.
        blocks=list(range(1, (start + count) // runner.pages.block_size + 2)),
    )
    result = executor.execute(StepPlan((StepRow(request, start, count, completes=True),)), {})
    if draft is not None:
        request.tokens.extend(result.rows[0].token_ids)
        draft.speculator.proposer.propose([DraftRow(request, start, start + count, 0, limit=1)], result.hidden)
