"""Drives a draft through the paged reference attention, and its loading from a folder, as the engine would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from server.checkpoint.headers import read_headers
from server.checkpoint.locate import locate
from server.engine.attention.base import AttentionNeed
from server.engine.attention.torch import TorchAttention
from server.engine.batch import Span, make_batch
from server.engine.layers.context import BuildContext
from server.engine.loading.load import load_weights
from server.engine.models.config import ModelConfig
from server.engine.models.decoder import CausalLM, build_model
from server.engine.models.draft import DraftHidden, RecurrentDraft
from server.engine.models.draft_kind import draft_kind
from server.engine.models.recurrent import RecurrentConfig, build_recurrent, read_recurrent_config
from server.engine.parallel import ParallelGroup

BLOCK = 16
CPU = torch.device("cpu")
torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other


def context(config: ModelConfig, *, moe: str = "torch", num_pages: int = 32) -> BuildContext:
    """An attention backend of the config's geometry, with its cache, and what else building takes."""
    need = AttentionNeed(CPU, torch.float32, torch.float32, config.num_heads, config.num_kv_heads, config.head_dim)
    attention = TorchAttention(need, config.num_layers)
    attention.allocate(num_pages, BLOCK)
    return BuildContext(torch.float32, CPU, attention, moe, ParallelGroup())


def load_target(folder: Path, capture: Sequence[int] = ()) -> CausalLM:
    """A target with its weights."""
    checkpoint = locate(str(folder))
    config = ModelConfig.from_hf(checkpoint.config)
    model = build_model(config, context(config), capture)
    load_weights(model, checkpoint, "auto", 0, lambda done, total: None)
    return model


def read_config(folder: Path, target: ModelConfig, override: Sequence[int] | None = None) -> RecurrentConfig:
    """The draft's config as the planner reads it."""
    checkpoint = locate(str(folder))
    headers = read_headers(checkpoint)
    kind = draft_kind(checkpoint.config, headers)
    assert kind != "draft_model"
    return read_recurrent_config(kind, checkpoint.config, headers, target, override)


@dataclass
class PagedDraft:
    """A draft, its cache, and the tables of rows of up to 48 slots."""

    model: RecurrentDraft
    attention: TorchAttention
    tables: dict[str, list[int]] = field(default_factory=dict)

    def step(self, rows: dict[str, tuple[int, Tensor, Sequence[int]]], step: int) -> dict[str, DraftHidden]:
        """Run one step over rows of (first slot, hidden [n, H], ids)."""
        for name in rows:
            # Not in order, so that neighbours in a row are not neighbours in memory; block 0 stays the padding.
            base = 1 + 3 * len(self.tables)
            self.tables.setdefault(name, [base + 1, base, base + 2])
        spans = [Span(self.tables[name], start, ids) for name, (start, _, ids) in rows.items()]
        batch = make_batch(spans, BLOCK, BLOCK, CPU)
        hidden = torch.cat([hidden for _, hidden, _ in rows.values()])
        before = hidden.clone()
        made = self.model(hidden, batch.input_ids, batch.positions, self.attention.plan(batch.step), step)
        assert torch.equal(hidden, before)
        starts = batch.step.query_start
        return {
            name: DraftHidden(made.output[starts[i] : starts[i + 1]], made.recurrent[starts[i] : starts[i + 1]])
            for i, name in enumerate(rows)
        }


def load_draft(
    folder: Path, target: CausalLM, override: Sequence[int] | None = None, *, moe: str = "torch"
) -> PagedDraft:
    """A draft with its weights, borrowing from the target what it lacks."""
    config = read_config(folder, target.config, override)
    own = context(config.model, moe=moe)
    model = build_recurrent(config, own, target.ends)
    load_weights(model, locate(str(folder)), "auto", 0, lambda done, total: None)
    assert isinstance(own.attention, TorchAttention)
    return PagedDraft(model, own.attention)
