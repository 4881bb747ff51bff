"""Forward passes over rows that bring as many new tokens each: decoding, and verifying k drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from server.engine.attention.base import AttentionBackend, CapturableAttention, StepMetadata, UniformStep
from server.engine.batch import Batch
from server.engine.graphs import Graphs
from server.engine.kv.groups import Pages
from server.engine.models.decoder import CausalLM
from server.engine.models.draft import TargetHidden
from server.engine.resident import StepInputs, page_tables, token_places
from server.engine.runner import ModelRunner
from server.engine.sampling.transfer import to_device


@dataclass(frozen=True)
class Places:
    """Where the new tokens of uniform rows stand, all on the device."""

    positions: Tensor
    """int64 [R * query_len]."""
    step: UniformStep


def places(first: Tensor, query_len: int, blocks: Tensor, real: Tensor, pages: Pages) -> Places:
    """Lay out `query_len` tokens a row.

    Args:
        first: int64 [R], the first one's position.
        query_len: tokens a row.
        blocks: int64 [R, W], the rows' blocks, wide enough for every position.
        real: bool [R], false for rows of padding.
        pages: how blocks are cut.
    """
    positions, slots = token_places(first, query_len, blocks, real, pages.block_size)
    step = UniformStep(
        query_len=query_len,
        longest=blocks.shape[1] * pages.block_size,
        seq_lens=((first + query_len) * real).to(torch.int32),
        block_tables=page_tables(blocks, pages),
        slot_mapping=slots,
    )
    return Places(positions, step)


def plan_of(attention: AttentionBackend, step: UniformStep) -> Any:
    """The backend's plan; one that cannot do without lengths on the host makes it wait for them."""
    if isinstance(attention, CapturableAttention):
        return attention.plan_uniform(step)
    starts = list(range(0, len(step.slot_mapping) + 1, step.query_len))
    lengths = step.seq_lens.tolist()
    return attention.plan(StepMetadata(starts, lengths, step.block_tables, step.slot_mapping))


class UniformForward:
    """The target's forward pass over uniform rows, from inputs at fixed addresses."""

    def __init__(
        self, runner: ModelRunner[CausalLM], query_len: int, sizes: Sequence[int], width: int, graphs: Graphs
    ) -> None:
        """Make the inputs' memory.

        Args:
            runner: the target's.
            query_len: new tokens a row.
            sizes: numbers of rows that are run; others are padded.
            width: blocks of the longest sequence.
            graphs: keeps what is captured.
        """
        most, device = max(sizes), runner.setup.device
        self.runner = runner
        self.query_len = query_len
        self._sizes = sorted(sizes)
        self._graphs = graphs
        self._longest = width * runner.pages.block_size
        tokens = torch.zeros(most * query_len, dtype=torch.int64, device=device)
        self.inputs = StepInputs(
            ids=tokens,
            positions=torch.zeros_like(tokens),
            slots=torch.full_like(tokens, -1),
            lengths=torch.zeros(most, dtype=torch.int32, device=device),
            tables=torch.zeros(most, width * runner.pages.per_block, dtype=torch.int64, device=device),
        )

    def size(self, rows: int) -> int:
        """Rows that are run for so many; without graphs, none are padded."""
        if not self._graphs.enabled:
            return rows
        return next(size for size in self._sizes if size >= rows)

    def fits(self, rows: int) -> bool:
        """Whether so many rows can be run."""
        return rows <= self._sizes[-1]

    def run_batch(self, batch: Batch) -> TargetHidden:
        """Run rows that the host laid out; the result is overwritten by the next run."""
        step, inputs = batch.step, self.inputs
        rows = len(step.seq_lens)
        tokens, size = rows * self.query_len, self.size(rows)
        inputs.ids[:tokens].copy_(batch.input_ids)
        inputs.positions[:tokens].copy_(batch.positions)
        inputs.slots[:tokens].copy_(step.slot_mapping)
        inputs.slots[tokens : size * self.query_len].fill_(-1)
        lengths = np.array([*step.seq_lens, *[0] * (size - rows)], np.int32)
        inputs.lengths[:size].copy_(to_device(lengths, inputs.lengths.device))
        inputs.tables[:rows, : step.block_tables.shape[1]].copy_(step.block_tables)
        hidden = self.run(size)
        return TargetHidden(hidden.final[:tokens], None if hidden.aux is None else hidden.aux[:tokens])

    def run(self, size: int) -> TargetHidden:
        """Run `size` rows of what the inputs hold; the result [size * query_len, …] is overwritten by the next run."""
        return self._graphs.run(("forward", self.query_len, size), lambda: self._forward(size))

    def _forward(self, size: int) -> TargetHidden:
        tokens, inputs = size * self.query_len, self.inputs
        step = UniformStep(
            self.query_len, self._longest, inputs.lengths[:size], inputs.tables[:size], inputs.slots[:tokens]
        )
        plan = plan_of(self.runner.attention, step)
        hidden: TargetHidden = self.runner.model(inputs.ids[:tokens], inputs.positions[:tokens], plan)
        return hidden
