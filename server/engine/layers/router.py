"""Routers: which experts a token goes to, and with which weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.engine.kernels.available import compiles_for
from server.engine.layers.context import BuildContext
from server.engine.layers.linear import linear


class SoftmaxRouter(nn.Module):
    """The k most probable experts under a softmax over all of them (Qwen3-MoE)."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, context: BuildContext, *, renormalize: bool
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.renormalize = renormalize
        self.weight = context.parameter(num_experts, hidden_size)
        self.counters: Tensor | None = None
        if compiles_for(context.device):
            from server.engine.kernels.linear import make_counters

            self.counters = make_counters(num_experts, context.device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden_size] -> expert ids int64 [T, k] and their weights [T, k] in x's dtype."""
        if self.counters is not None:
            from server.engine.kernels.choose_experts import softmax_topk

            return softmax_topk(linear(x, self.weight, None, self.counters), self.top_k, self.renormalize)
        probabilities = F.linear(x, self.weight).softmax(-1, dtype=torch.float32)
        weights, ids = probabilities.topk(self.top_k, dim=-1)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights.to(x.dtype)

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names under `prefix`, and the memory they fill."""
        return {f"{prefix}.weight": self.weight}


class SigmoidRouter(nn.Module):
    """Independent scores, chosen with a bias and by groups, weighted without the bias (GLM-4.5, DeepSeek-V3).

    All of it is fp32, the gate's product included.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        context: BuildContext,
        *,
        renormalize: bool,
        scaling_factor: float,
        num_groups: int,
        topk_groups: int,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.renormalize = renormalize
        self.scaling_factor = scaling_factor
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.weight = context.parameter(num_experts, hidden_size, dtype=torch.float32)
        self.bias = context.parameter(num_experts, dtype=torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden_size] -> expert ids int64 [T, k] and their weights fp32 [T, k]."""
        scores = F.linear(x.float(), self.weight).sigmoid_()
        ids = self._choose(scores + self.bias)
        weights = scores.gather(1, ids)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * self.scaling_factor

    def _choose(self, biased: Tensor) -> Tensor:
        if self.topk_groups < self.num_groups:
            grouped = biased.view(len(biased), self.num_groups, -1)
            # A group is as good as its two best experts together.
            kept = grouped.topk(2, dim=-1).values.sum(-1).topk(self.topk_groups, dim=-1).indices
            dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, kept, False)
            biased = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
        return biased.topk(self.top_k, dim=-1).indices

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names under `prefix`, and the memory they fill."""
        return {f"{prefix}.weight": self.weight, f"{prefix}.e_score_correction_bias": self.bias}
