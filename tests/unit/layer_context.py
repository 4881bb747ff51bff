"""What layers need to be built, on the CPU."""

from __future__ import annotations

import torch

from server.engine.attention.base import AttentionNeed
from server.engine.attention.torch import TorchAttention
from server.engine.layers.context import BuildContext
from server.engine.parallel import ParallelGroup


def context(dtype: torch.dtype = torch.float32, group: ParallelGroup | None = None) -> BuildContext:
    cpu = torch.device("cpu")
    attention = TorchAttention(AttentionNeed(cpu, dtype, dtype, 2, 1, 16), 1)
    return BuildContext(dtype, cpu, attention, "torch", group or ParallelGroup())
