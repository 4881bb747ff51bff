"""How steps are executed: captured or eager, ahead of their results or after them. Decided once, at the start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from server.engine.attention.base import CapturableAttention
from server.engine.capturable import capture_problem
from server.engine.graphs import Graphs, graph_sizes
from server.engine.models.config import ModelConfig
from server.engine.models.decoder import CausalLM
from server.engine.models.eagle3 import Eagle3Draft
from server.engine.models.mtp import MTPDraft
from server.engine.run_ahead import Drafting, RunAhead
from server.engine.runner import ModelRunner
from server.engine.uniform import UniformForward

logger = logging.getLogger(__name__)

Runner: TypeAlias = ModelRunner[CausalLM | Eagle3Draft | MTPDraft]


@dataclass(frozen=True)
class ExecutionNeed:
    """What the engine is built for."""

    max_num_seqs: int
    max_model_len: int
    sampled_vocab_size: int
    drafted: int
    """k, 0 without a draft."""
    drafting: Drafting | None
    """How drafts are made on the device; None without drafts, or where the host must make them."""
    capture: bool
    """Whether graphs are wanted."""


@dataclass(frozen=True)
class Execution:
    """The ways to run a step beside the plain one."""

    graphs: Graphs
    uniform: Mapping[int, UniformForward]
    """By tokens a row."""
    run_ahead: RunAhead | None
    sizes: list[int]

    def capture(self, report: Callable[[int, int], None]) -> None:
        """Capture all graphs of decoding now, so that no request waits for one.

        Args:
            report: called with (sizes done, sizes in all).
        """
        if self.run_ahead is None:
            return
        for done, size in enumerate(self.sizes):
            report(done, len(self.sizes))
            self.run_ahead.capture(size)
        report(len(self.sizes), len(self.sizes))
        if self.graphs.enabled:
            torch.cuda.empty_cache()


def make_execution(target: ModelRunner[CausalLM], draft: Runner | None, need: ExecutionNeed) -> Execution:
    """Choose the ways that the built models allow; without any, steps run eagerly, one after the other."""
    graphs = Graphs(target.setup.device, need.capture)
    per_step = 1 + need.drafted
    problem = _problem(target, per_step)
    if problem is not None:
        logger.info("steps run eagerly, one after the other: %s", problem)
        return Execution(graphs, {}, None, [])
    # A step may be launched when another is under way: both can make 1 + k tokens, and k more are drafted.
    width = -(-(need.max_model_len + 3 * per_step) // target.pages.block_size)
    sizes = graph_sizes(need.max_num_seqs)
    uniform = {count: UniformForward(target, count, sizes, width, graphs) for count in {1, per_step}}
    run_ahead = None
    problem = _problem(draft, per_step) if draft is not None else None
    if problem is not None:
        logger.info("steps wait for their drafts: the draft's %s", problem)
    elif need.drafting is not None or not need.drafted:
        run_ahead = RunAhead(
            uniform[per_step], need.sampled_vocab_size, need.max_num_seqs, width, need.drafting, graphs
        )
    return Execution(graphs, uniform if graphs.enabled else {}, run_ahead, sizes)


def graph_bytes(config: ModelConfig, dtype: torch.dtype, need: ExecutionNeed, captured: int) -> int:
    """Memory that graphs will hold beside what an eager step needs, estimated from above.

    Args:
        config: the target's.
        dtype: it computes in.
        need: what is captured.
        captured: layer boundaries whose hidden states are kept for the draft.
    """
    if not need.capture:
        return 0
    per_step = 1 + need.drafted
    widest = need.max_num_seqs * per_step
    working = 2 * config.vocab_size + 4 * config.intermediate_size + 16 * config.hidden_size
    kept = sum(graph_sizes(need.max_num_seqs)) * per_step * (1 + captured) * config.hidden_size
    return (widest * working + kept) * dtype.itemsize


def _problem(runner: Runner, query_len: int) -> str | None:
    setup, attention = runner.setup, runner.attention
    problem = capture_problem(setup.device, setup.attention, setup.moe)
    if problem is None and isinstance(attention, CapturableAttention) and attention.longest_query() < query_len:
        return f"attention backend {setup.attention} captures {attention.longest_query()} tokens a row at most"
    return problem
