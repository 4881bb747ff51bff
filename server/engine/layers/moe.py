"""The mixture-of-experts block around a backend."""

from __future__ import annotations

from torch import Tensor, nn

from server.engine.layers.context import BuildContext
from server.engine.layers.mlp import GatedMLP
from server.engine.layers.router import SigmoidRouter, SoftmaxRouter
from server.engine.moe.base import ExpertWeights, MoENeed, PackedExperts, QuantizedExperts
from server.engine.moe.registry import moe_backend
from server.engine.quantization.format import Unquantized, WeightFormat
from server.engine.quantization.stored import QuantizedTensors
from server.errors import UserError


class Experts(nn.Module):
    """All experts of one layer, stored together; it holds its backend."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, context: BuildContext
    ) -> None:
        """Make the memory. How the experts are stored is what the context knows about the names under its prefix.

        Raises:
            UserError: the checkpoint lacks all of them, so that their backend was planned for others.
            ValueError: the context names a backend that cannot serve these experts; the planner asks before.
        """
        super().__init__()
        intermediate_size = context.group.split(intermediate_size, "moe_intermediate_size")
        self.prefix = context.prefix
        self.weight_format = expert_format(num_experts, context)
        need = MoENeed(
            context.device, context.dtype, num_experts, top_k, hidden_size, intermediate_size, self.weight_format
        )
        backend = moe_backend(context.moe)
        unsupported = backend.supports(need)
        if unsupported is not None:
            if context.formats.lacks(f"{context.prefix}{name}" for name in expert_names(num_experts)):
                raise UserError(
                    f"the checkpoint lacks tensors {context.prefix}*, which the model's config calls for: it holds no "
                    "experts of this layer. Does its config.json belong to its weights?"
                )
            raise ValueError(f"MoE backend {context.moe!r} was planned but does not serve: {unsupported.reason}")
        self.backend = backend(need)
        self.w13: nn.Parameter | None = None
        self.w2: nn.Parameter | None = None
        self.quantized: QuantizedExperts | None = None
        self.packed: PackedExperts = None
        if isinstance(self.weight_format, Unquantized):
            self.w13 = context.parameter(num_experts, 2 * intermediate_size, hidden_size)
            self.w2 = context.parameter(num_experts, hidden_size, intermediate_size)
        else:
            format, device = self.weight_format, context.device
            self.quantized = QuantizedExperts(
                QuantizedTensors.allocate(format, intermediate_size, hidden_size, device, (num_experts, 2)),
                QuantizedTensors.allocate(format, hidden_size, intermediate_size, device, (num_experts,)),
            )

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `MoEBackend.forward`."""
        return self.backend.forward(x, self.packed, topk_ids, topk_weights)

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """One entry per expert and projection, as most checkpoints hold them."""
        targets: dict[str, Tensor] = {}
        if self.quantized is not None:
            for i in range(self.backend.need.num_experts):
                targets |= self.quantized.gate_up[i, 0].targets(f"{prefix}.{i}.gate_proj")
                targets |= self.quantized.gate_up[i, 1].targets(f"{prefix}.{i}.up_proj")
                targets |= self.quantized.down[i].targets(f"{prefix}.{i}.down_proj")
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
        """Hand the weights to the backend; from here on it alone keeps them.

        Raises:
            UserError: quantised tensors contradict each other.
        """
        if self.quantized is not None:
            self.quantized.gate_up.check(f"{self.prefix}*.(gate|up)_proj")
            self.quantized.down.check(f"{self.prefix}*.down_proj")
            self.packed = self.backend.pack(self.quantized)
            self.quantized = None
        if self.w13 is not None and self.w2 is not None:
            self.packed = self.backend.pack(ExpertWeights(self.w13.data, self.w2.data))
            self.w13 = self.w2 = None


def expert_format(num_experts: int, context: BuildContext) -> WeightFormat:
    """How all experts of a layer are stored.

    Raises:
        UserError: they differ, or one of them cannot be served; the planner asks before.
    """
    return context.weight_format(expert_names(num_experts))


def expert_names(num_experts: int) -> list[str]:
    """The modules of a layer's experts, as checkpoints name them under its prefix."""
    return [f"{i}.{name}" for i in range(num_experts) for name in ("gate_proj", "up_proj", "down_proj")]


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
