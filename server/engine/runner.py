"""Builds one model from a ModelSetup and runs it. Target and draft are two instances of this one class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from server.engine.attention.base import AttentionNeed
from server.engine.attention.registry import attention_backend
from server.engine.batch import Batch, Span, make_batch
from server.engine.layers.context import BuildContext
from server.engine.loading.load import load_weights
from server.engine.models.decoder import build_model
from server.engine.setup import ModelSetup
from server.engine.step import BlockCopy


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

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache."""
        pages = self.setup.pages
        self.attention.allocate(num_blocks * pages.per_block, pages.page_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.attention.page_bytes(self.setup.pages.page_size) * self.setup.pages.per_block

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in all layers; all are read before any is written."""
        ratio = self.setup.pages.per_block
        pages = torch.tensor([[copy.source, copy.target] for copy in copies], device=self.setup.device)
        expanded = pages[:, None] * ratio + torch.arange(ratio, device=self.setup.device)[None, :, None]
        sources, targets = expanded.flatten(0, 1).unbind(1)
        self.attention.copy_pages(sources, targets)

    def batch(self, spans: Sequence[Span]) -> Batch:
        """The inputs of one forward pass over this model's cache."""
        pages = self.setup.pages
        return make_batch(spans, pages.block_size, pages.page_size, self.setup.device)
