"""What is needed to build one model: decided before any layer exists, and never changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from server.checkpoint.checkpoint import Checkpoint
from server.engine.attention.base import AttentionNeed
from server.engine.check import CheckRow
from server.engine.cpu.forms import WeightForms
from server.engine.models.config import ModelConfig
from server.engine.models.recurrent import RecurrentConfig
from server.engine.parallel import ParallelGroup
from server.engine.quantization.formats import Formats


@dataclass(frozen=True)
class ModelSetup:
    """All that is needed to build and fill one model. Nothing else is consulted while building."""

    role: Literal["target", "draft"]
    checkpoint: Checkpoint
    config: ModelConfig | RecurrentConfig
    """A whole model, or a head that runs on the target's hidden states."""
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    attention: str
    moe: str | None
    formats: Formats
    load_format: str
    seed: int
    group: ParallelGroup
    forms: WeightForms
    """In which linear layers are kept."""
    rows: tuple[CheckRow, ...]
    """What was asked for, what it became and why, by component."""

    @property
    def layers(self) -> ModelConfig:
        """The shape of its decoder layers."""
        return self.config if isinstance(self.config, ModelConfig) else self.config.model

    @property
    def need(self) -> AttentionNeed:
        """What its attention layers ask of their backend."""
        return attention_need(self.layers, self.device, self.dtype, self.kv_dtype)


def attention_need(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> AttentionNeed:
    """What the attention layers of a model ask of their backend."""
    return AttentionNeed(device, dtype, kv_dtype, config.num_heads, config.num_kv_heads, config.head_dim)
