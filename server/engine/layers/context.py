"""What a layer needs to be built, handed down explicitly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from server.engine.attention.base import AttentionBackend
from server.engine.parallel import ParallelGroup


@dataclass(frozen=True)
class BuildContext:
    """Where a model lives and which backends its layers hold."""

    dtype: torch.dtype
    device: torch.device
    attention: AttentionBackend
    moe: str
    """A name of `server.engine.moe.registry`; not read by models without experts."""
    group: ParallelGroup

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Memory for a weight, not initialised; in the model's dtype unless another is given."""
        memory = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(memory, requires_grad=False)
