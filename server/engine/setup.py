"""What is needed to build one model: decided before any layer exists, and never changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from server.checkpoint.checkpoint import Checkpoint
from server.engine.models.config import ModelConfig
from server.engine.parallel import ParallelGroup
from server.messages import ResolvedRow


@dataclass(frozen=True)
class Pages:
    """How a KV group is cut. Everyone who reads the cache reads it from here."""

    block_size: int
    """Tokens that are given out and shared together."""
    page_size: int
    """Tokens that the kernels address together; a divisor of the block size."""

    @property
    def per_block(self) -> int:
        """Kernel pages a block."""
        return self.block_size // self.page_size


@dataclass(frozen=True)
class ModelSetup:
    """All that is needed to build and fill one model. Nothing else is consulted while building."""

    role: Literal["target", "draft"]
    checkpoint: Checkpoint
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    attention: str
    moe: str | None
    load_format: str
    seed: int
    group: ParallelGroup
    pages: Pages
    rows: tuple[ResolvedRow, ...]
    """What was asked for and what was resolved, by component."""
