"""The mixture-of-experts block around a backend."""

from __future__ import annotations

from torch import Tensor, nn

from server.engine.layers.context import BuildContext
from server.engine.layers.mlp import GatedMLP
from server.engine.layers.router import SigmoidRouter, SoftmaxRouter
from server.engine.moe.base import ExpertWeights, MoENeed, PackedExperts
from server.engine.moe.registry import moe_backend


class Experts(nn.Module):
    """All experts of one layer, stored together; it holds its backend."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, context: BuildContext
    ) -> None:
        """Make the memory.

        Raises:
            ValueError: the context names a backend that cannot serve these experts; the planner asks before.
        """
        super().__init__()
        intermediate_size = context.group.split(intermediate_size, "moe_intermediate_size")
        need = MoENeed(context.device, context.dtype, num_experts, top_k, hidden_size, intermediate_size)
        backend = moe_backend(context.moe)
        unsupported = backend.supports(need)
        if unsupported is not None:
            raise ValueError(f"MoE backend {context.moe!r} was planned but does not serve: {unsupported.reason}")
        self.backend = backend(need)
        self.w13: nn.Parameter | None = context.parameter(num_experts, 2 * intermediate_size, hidden_size)
        self.w2: nn.Parameter | None = context.parameter(num_experts, hidden_size, intermediate_size)
        self.packed: PackedExperts = None

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `MoEBackend.forward`."""
        return self.backend.forward(x, self.packed, topk_ids, topk_weights)

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """One entry per expert and projection, as most checkpoints hold them."""
        targets: dict[str, Tensor] = {}
        if self.w13 is None or self.w2 is None:
            return targets
        for i, (w13, w2) in enumerate(zip(self.w13, self.w2, strict=True)):
            gate, up = w13.chunk(2)
            targets |= {
                f"{prefix}.{i}.gate_proj.weight": gate,
                f"{prefix}.{i}.up_proj.weight": up,
                f"{prefix}.{i}.down_proj.weight": w2,
            }
        return targets

    def finish_loading(self) -> None:
        """Hand the weights to the backend; from here on it alone keeps them."""
        if self.w13 is not None and self.w2 is not None:
            self.packed = self.backend.pack(ExpertWeights(self.w13.data, self.w2.data))
            self.w13 = self.w2 = None


class MoEBlock(nn.Module):
    """Router, experts, and the shared expert that every token passes."""

    def __init__(self, router: SoftmaxRouter | SigmoidRouter, experts: Experts, shared: GatedMLP | None = None) -> None:
        super().__init__()
        self.gate = router
        self.experts = experts
        self.shared_experts = shared

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> the same."""
        ids, weights = self.gate(x)
        out: Tensor = self.experts(x, ids, weights)
        if self.shared_experts is not None:
            out += self.shared_experts(x)
        return out

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names under `prefix`, and the memory they fill."""
        targets = self.gate.weight_targets(f"{prefix}.gate") | self.experts.weight_targets(f"{prefix}.experts")
        if self.shared_experts is not None:
            targets |= self.shared_experts.weight_targets(f"{prefix}.shared_experts")
        return targets
