"""RMS norms; the arithmetic inside is fp32 (torch's `rms_norm` upcasts)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.engine.kernels.available import compiles_for
from server.engine.layers.context import BuildContext

LARGEST_COMPILED = 16384
"""The kernel keeps a row in registers."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, with the residual addition that precedes it."""

    def __init__(self, size: int, eps: float, context: BuildContext) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = context.parameter(size)
        self.compiled = size <= LARGEST_COMPILED and compiles_for(context.device)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Normalise the sum of x [T, size] and the residual; returns (norm(sum), sum).

        The sum is written into `residual`; without one, x itself becomes the residual.
        """
        if self.compiled:
            from server.engine.kernels.norm import rms_norm

            return rms_norm(x, residual, self.weight, self.eps), x if residual is None else residual
        residual = x if residual is None else residual.add_(x)
        return F.rms_norm(residual, self.shape, self.weight, self.eps), residual

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names, `prefix` included, and the memory they fill."""
        return {f"{prefix}.weight": self.weight}


class QueryKeyNorm(nn.Module):
    """The per-head norms of queries and keys, in one pass over both."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, context: BuildContext) -> None:
        super().__init__()
        self.heads = torch.tensor([num_heads, num_kv_heads], device=context.device)
        self.shape = (head_dim,)
        self.eps = eps
        self.weight = context.parameter(2, head_dim)
        self.per_head: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[T, num_heads + num_kv_heads, head_dim], query heads first."""
        if self.per_head is None:
            raise RuntimeError("finish_loading has not run")
        return F.rms_norm(x, self.shape, None, self.eps).mul_(self.per_head)

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names under the attention's `prefix`, and the memory they fill."""
        return {f"{prefix}.q_norm.weight": self.weight[0], f"{prefix}.k_norm.weight": self.weight[1]}

    def finish_loading(self) -> None:
        """Repeat the two weights for every head, so that one product applies them."""
        self.per_head = self.weight.repeat_interleave(self.heads, dim=0)
