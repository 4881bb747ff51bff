"""From settings to a running engine: plan, build, read back, size, warm up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from server.config import Settings
from server.engine.core import EngineCore
from server.engine.executor import StepExecutor
from server.engine.kv.cache import KVCache
from server.engine.kv.sizing import KVBudget, num_kv_blocks
from server.engine.link import EngineLink
from server.engine.plan import EnginePlan, make_plan
from server.engine.readback import read_back
from server.engine.request import Request
from server.engine.runner import ModelRunner
from server.engine.sampling.request import RequestSampling
from server.engine.scheduler import Scheduler, SchedulerLimits
from server.engine.step import StepPlan, StepRow
from server.errors import UserError
from server.messages import EngineReady, EngineRequest, KVGroup, Progress, SamplingParams

logger = logging.getLogger(__name__)


def start_engine(settings: Settings, link: EngineLink) -> EngineCore:
    """Build everything and tell the API process.

    Raises:
        UserError: for a reason that the user can act on.
    """
    started = time.monotonic()
    plan = make_plan(settings)
    runner = ModelRunner(plan.target, _progress(link, "loading weights"))
    rows, model = read_back(runner)
    blocks = _kv_blocks(settings, plan, runner)
    runner.allocate(blocks)
    pages = plan.target.pages
    kv = KVCache(blocks, pages.block_size, settings.enable_prefix_caching)
    max_model_len = _fitting_length(settings, plan, kv.capacity)
    executor = StepExecutor(runner)
    _warm_up(executor)
    limits = SchedulerLimits(
        settings.max_num_seqs,
        plan.max_num_batched_tokens,
        settings.enable_chunked_prefill,
        settings.scheduling_policy == "priority",
    )
    core = EngineCore(link, Scheduler(limits, kv), executor, None, plan.target.config.vocab_size, max_model_len)
    link.send(
        EngineReady(
            rows=rows,
            kv_groups=[KVGroup(0, pages.block_size, pages.page_size, kv.pool.usable, plan.target.config.num_layers)],
            models=[model],
            max_model_len=max_model_len,
            kv_bytes=blocks * runner.block_bytes,
            device=str(plan.target.device),
            load_seconds=time.monotonic() - started,
        )
    )
    return core


def _progress(link: EngineLink, stage: str) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        link.send(Progress(stage, done, total))

    return report


def _kv_blocks(settings: Settings, plan: EnginePlan, runner: ModelRunner) -> int:
    budget = KVBudget(settings.num_kv_blocks, settings.kv_cache_memory, settings.gpu_memory_utilization)
    block_size = plan.target.pages.block_size
    if plan.target.device.type == "cuda":
        # The largest step, over a cache just large enough for it, shows the peak beside the weights.
        runner.allocate(-(-plan.max_num_batched_tokens // block_size) + 1)
        torch.cuda.reset_peak_memory_stats(plan.target.device)
        _run_prompt(StepExecutor(runner), plan.max_num_batched_tokens)
        torch.cuda.synchronize(plan.target.device)
        runner.allocate(2)
        torch.cuda.empty_cache()
    return num_kv_blocks(
        budget,
        plan.target.device,
        runner.block_bytes,
        block_size,
        plan.max_model_len,
        settings.max_num_seqs,
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


def _warm_up(executor: StepExecutor) -> None:
    """A prompt and a decode, so that the first request does not pay for what torch sets up once."""
    length = executor.runner.setup.pages.block_size
    _run_prompt(executor, length - 1)
    _run_prompt(executor, 1, start=length - 1)


def _run_prompt(executor: StepExecutor, count: int, start: int = 0) -> None:
    tokens = [0] * (start + count)
    params = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    setup = executor.runner.setup
    request = Request(
        EngineRequest(0, tokens, params, 0.0),
        RequestSampling(params, tokens, setup.config.vocab_size),
        max_len=start + count + 1,
        tokens=tokens,
        blocks=list(range(1, -(-(start + count) // setup.pages.block_size) + 1)),
    )
    executor.execute(StepPlan((StepRow(request, start, count, completes=True),)), {})
