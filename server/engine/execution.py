"""How steps are executed: captured or eager, ahead of their results or after them. Decided once, at the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from server.engine.attention.base import CapturableAttention
from server.engine.graphs import Graphs, graph_sizes
from server.engine.models.decoder import CausalLM
from server.engine.models.eagle3 import Eagle3Draft
from server.engine.models.mtp import MTPDraft
from server.engine.moe.registry import moe_backend
from server.engine.run_ahead import Drafting, RunAhead
from server.engine.runner import ModelRunner
from server.engine.uniform import UniformForward


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


def make_execution(
    target: ModelRunner[CausalLM], draft: ModelRunner[CausalLM | Eagle3Draft | MTPDraft] | None, need: ExecutionNeed
) -> Execution:
    """Choose the ways that the built models allow; without any, steps run eagerly, one after the other."""
    graphs = Graphs(target.setup.device, need.capture)
    per_step = 1 + need.drafted
    if not _never_waits(target, per_step) or draft is not None and not _never_waits(draft, per_step):
        return Execution(graphs, {}, None, [])
    # A step may be launched when another is under way: both can make 1 + k tokens, and k more are drafted.
    width = -(-(need.max_model_len + 3 * per_step) // target.pages.block_size)
    sizes = graph_sizes(need.max_num_seqs)
    uniform = {count: UniformForward(target, count, sizes, width, graphs) for count in {1, per_step}}
    run_ahead = None
    if need.drafting is not None or not need.drafted:
        run_ahead = RunAhead(
            uniform[per_step], need.sampled_vocab_size, need.max_num_seqs, width, need.drafting, graphs
        )
    return Execution(graphs, uniform if graphs.enabled else {}, run_ahead, sizes)


def _never_waits(runner: ModelRunner[CausalLM | Eagle3Draft | MTPDraft], query_len: int) -> bool:
    attention = runner.attention
    if runner.setup.device.type != "cuda" or not isinstance(attention, CapturableAttention):
        return False
    if attention.longest_query() < query_len:
        return False
    return runner.setup.moe is None or moe_backend(runner.setup.moe).capturable
