"""Builds one model from a ModelSetup and runs planned steps on it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from server.engine.attention.base import AttentionNeed, StepMetadata
from server.engine.attention.registry import attention_backend
from server.engine.layers.context import BuildContext
from server.engine.loading.load import load_weights
from server.engine.models.decoder import build_model
from server.engine.plan import ModelSetup
from server.engine.sampling.logprobs import token_logprobs
from server.engine.sampling.request import SampleRow
from server.engine.sampling.sampler import Sampler
from server.engine.step import RowResult, StepPlan, StepRow
from server.messages import TokenLogprobs


class ModelRunner:
    """One model, its attention backend and its part of the KV cache."""

    def __init__(self, setup: ModelSetup, progress: Callable[[int, int], None]) -> None:
        self.setup = setup
        config = setup.config
        need = AttentionNeed(
            setup.device, setup.dtype, setup.kv_dtype, config.num_heads, config.num_kv_heads, config.head_dim
        )
        self.attention = attention_backend(setup.attention)(need, config.num_layers)
        context = BuildContext(setup.dtype, setup.device, self.attention, setup.moe or "", setup.group)
        self.model = build_model(config, context)
        load_weights(self.model, setup.checkpoint, setup.load_format, setup.seed, progress)
        self.sampler = Sampler()
        self._page_size = 0

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the KV cache."""
        self._page_size = block_size
        self.attention.allocate(num_blocks, block_size)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, phase_seconds: dict[str, list[float]]) -> list[RowResult]:
        """Run one step.

        Returns:
            One result a row, in the plan's order.
        """
        started = time.perf_counter()
        if plan.copies:
            device = self.setup.device
            self.attention.copy_pages(
                torch.tensor([copy.source for copy in plan.copies], device=device),
                torch.tensor([copy.target for copy in plan.copies], device=device),
            )
        input_ids, positions, step = self._inputs(plan.rows)
        hidden = self.model(input_ids, positions, self.attention.plan(step))
        results = self._results(plan.rows, step.query_start, hidden)
        phase_seconds.setdefault("target", []).append(time.perf_counter() - started)
        return results

    def _inputs(self, rows: tuple[StepRow, ...]) -> tuple[Tensor, Tensor, StepMetadata]:
        total = sum(row.count for row in rows)
        ids = np.empty(total, np.int64)
        positions = np.empty(total, np.int64)
        slots = np.empty(total, np.int64)
        query_start = [0]
        size = self._page_size
        tables = np.zeros((len(rows), max(-(-row.end // size) for row in rows)), np.int64)
        for i, row in enumerate(rows):
            at, to = query_start[-1], query_start[-1] + row.count
            query_start.append(to)
            pages = -(-row.end // size)
            tables[i, :pages] = row.request.blocks[:pages]
            if row.count == 1:
                position = row.start
                ids[at], positions[at] = row.request.tokens[position], position
                slots[at] = tables[i, position // size] * size + position % size
            else:
                span = np.arange(row.start, row.end)
                ids[at:to] = row.request.tokens[row.start : row.end]
                positions[at:to] = span
                slots[at:to] = tables[i, span // size] * size + span % size
        device = self.setup.device
        step = StepMetadata(
            query_start,
            [row.end for row in rows],
            torch.from_numpy(tables).to(device),
            torch.from_numpy(slots).to(device),
        )
        return torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device), step

    def _results(self, rows: tuple[StepRow, ...], query_start: list[int], hidden: Tensor) -> list[RowResult]:
        prompt_logprobs = {
            i: self._prompt_logprobs(row, hidden[query_start[i] : query_start[i + 1]])
            for i, row in enumerate(rows)
            if row.request.params.prompt_logprobs is not None and not row.request.started
        }
        sampling = [i for i, row in enumerate(rows) if row.samples]
        tokens: dict[int, tuple[int, TokenLogprobs | None]] = {}
        if sampling:
            last = [query_start[i + 1] - 1 for i in sampling]
            # Logits only for the rows that need them.
            chosen = hidden if len(last) == len(hidden) else hidden[torch.tensor(last, device=hidden.device)]
            sampled = self.sampler(
                self.model.logits(chosen),
                [SampleRow(rows[i].request.sampling, rows[i].request.output) for i in sampling],
            )
            tokens = dict(zip(sampling, zip(sampled.token_ids.tolist(), sampled.logprobs, strict=True), strict=True))
        return [self._result(tokens.get(i), prompt_logprobs.get(i, ())) for i in range(len(rows))]

    @staticmethod
    def _result(sampled: tuple[int, TokenLogprobs | None] | None, prompt: tuple[TokenLogprobs, ...]) -> RowResult:
        token_id, logprobs = sampled or (None, None)
        return RowResult(token_id, logprobs, prompt)

    def _prompt_logprobs(self, row: StepRow, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        """Of the prompt tokens row.start + 1 … row.end, which these hidden states predict."""
        request = row.request
        targets = request.source.prompt_token_ids[row.start + 1 : row.end + 1]
        if not targets:
            return ()
        top = request.params.prompt_logprobs or 0
        found: list[TokenLogprobs] = []
        # By pieces: a long prompt's logits over a large vocabulary would take gigabytes.
        for at in range(0, len(targets), 256):
            piece = targets[at : at + 256]
            found += token_logprobs(self.model.logits(hidden[at : at + len(piece)]), piece, top)
        return tuple(found)
