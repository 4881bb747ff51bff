"""Builds one model from a ModelSetup and keeps its cache. Target and draft are two instances of this one class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from server.engine.attention.registry import attention_backend
from server.engine.attention.torch import TorchAttention
from server.engine.batch import Batch, Span, make_batch
from server.engine.kv.groups import Pages
from server.engine.layers.context import BuildContext
from server.engine.loading.load import load_weights
from server.engine.models.config import ModelConfig
from server.engine.models.decoder import CausalLM, build_model
from server.engine.models.draft import DraftHidden, TargetHidden
from server.engine.models.eagle3 import Eagle3Draft
from server.engine.models.mtp import MTPDraft
from server.engine.models.recurrent import build_recurrent
from server.engine.setup import ModelSetup
from server.engine.step import BlockCopy

Progress = Callable[[int, int], None]
M_co = TypeVar("M_co", bound=CausalLM | Eagle3Draft | MTPDraft, covariant=True)


class ModelRunner(Generic[M_co]):
    """One model, its attention backend and its part of the KV cache."""

    def __init__(
        self, setup: ModelSetup, pages: Pages, build: Callable[[BuildContext], M_co], progress: Progress
    ) -> None:
        """Build and fill the model.

        Args:
            setup: the plan for it; nothing else decides what its layers hold.
            pages: of its KV group.
            build: allocates the model in a context.
            progress: called with (bytes done, bytes in all).
        """
        self.setup = setup
        self.pages = pages
        context = build_context(setup)
        self.attention = context.attention
        self.model = build(context)
        self.loaded_from = load_weights(self.model, setup.checkpoint, setup.load_format, setup.seed, progress)
        """The load format, as it turned out."""

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache."""
        self.attention.allocate(num_blocks * self.pages.per_block, self.pages.page_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.attention.page_bytes(self.pages.page_size) * self.pages.per_block

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in all layers; all are read before any is written."""
        device, ratio = self.setup.device, self.pages.per_block
        blocks = torch.tensor([[copy.source, copy.target] for copy in copies], device=device)
        pages = blocks[:, None] * ratio + torch.arange(ratio, device=device)[None, :, None]
        sources, targets = pages.flatten(0, 1).unbind(1)
        self.attention.copy_pages(sources, targets)

    def batch(self, spans: Sequence[Span]) -> Batch:
        """The inputs of one forward pass over this model's cache."""
        return make_batch(spans, self.pages.block_size, self.pages.page_size, self.setup.device)


def run_whole(runner: ModelRunner[CausalLM], batch: Batch) -> TargetHidden:
    """One forward pass of a whole model: as one call where its layers are packed for it, else layer by layer."""
    stack, attention = runner.model.stack, runner.attention
    if stack is not None and isinstance(attention, TorchAttention) and attention.cache is not None:
        if runner.setup.forms.packed_for(len(batch.input_ids)):
            return TargetHidden(*stack(batch.input_ids, batch.positions, batch.step, attention.cache))
    hidden: TargetHidden = runner.model(batch.input_ids, batch.positions, attention.plan(batch.step))
    return hidden


def run_head(runner: ModelRunner[Eagle3Draft | MTPDraft], hidden: Tensor, batch: Batch, step: int) -> DraftHidden:
    """The same for a head; see `RecurrentDraft`."""
    model, attention = runner.model, runner.attention
    stack = model.stack if isinstance(model, Eagle3Draft) else None
    if stack is not None and isinstance(attention, TorchAttention) and attention.cache is not None:
        if runner.setup.forms.packed_for(len(hidden)):
            output, stream = stack(batch.input_ids, batch.positions, batch.step, attention.cache, hidden)
            assert isinstance(model, Eagle3Draft) and stream is not None
            return DraftHidden(output, output if model.config.norm_output else stream)
    made: DraftHidden = model(hidden, batch.input_ids, batch.positions, attention.plan(batch.step), step)
    return made


def build_context(setup: ModelSetup) -> BuildContext:
    """What the model's layers are built with: the plan's word, and a backend of their own."""
    attention = attention_backend(setup.attention)(setup.need, setup.layers.num_layers)
    return BuildContext(setup.dtype, setup.device, attention, setup.moe or "", setup.group, setup.formats, setup.forms)


def build_target(setup: ModelSetup, pages: Pages, capture: Sequence[int], progress: Progress) -> ModelRunner[CausalLM]:
    """The target, capturing the hidden states that a draft reads."""
    return ModelRunner(setup, pages, lambda context: build_model(setup.layers, context, capture), progress)


def build_draft_model(setup: ModelSetup, pages: Pages, target: CausalLM, progress: Progress) -> ModelRunner[CausalLM]:
    """A draft that is a whole model, but for an embedding or head that it may borrow."""
    return ModelRunner(setup, pages, lambda context: build_model(setup.layers, context, lent=target.ends), progress)


def build_head(
    setup: ModelSetup, pages: Pages, target: CausalLM, progress: Progress
) -> ModelRunner[Eagle3Draft | MTPDraft]:
    """A head that runs on the target's hidden states, and borrows what its checkpoint lacks."""
    config = setup.config
    if isinstance(config, ModelConfig):
        raise TypeError(f"{config.architecture} is a whole model, not a head")
    return ModelRunner(setup, pages, lambda context: build_recurrent(config, context, target.ends), progress)
