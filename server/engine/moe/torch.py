"""The reference experts: one after the other, on any device and in any dtype."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from server.engine.attention.base import Unsupported
from server.engine.layers.activation import silu_mul
from server.engine.moe.base import ExpertWeights, MoENeed, QuantizedExperts


class TorchMoE:
    """A loop over the experts that received tokens; sums in fp32. It synchronises with the device.

    Quantised experts stay so in memory, since all of them together are most of a model. One that received tokens is
    dequantised for the step, which costs several times its product; other backends are there to be quick.
    """

    name: ClassVar[str] = "torch"
    capturable: ClassVar[bool] = False

    @classmethod
    def supports(cls, need: MoENeed) -> Unsupported | None:
        """Everything that torch can multiply."""
        if not need.dtype.is_floating_point:
            return Unsupported(f"dtype {need.dtype} (it computes in floating point)")
        return None

    def __init__(self, need: MoENeed) -> None:
        self.need = need

    def pack(self, experts: ExpertWeights | QuantizedExperts) -> ExpertWeights | QuantizedExperts:
        """As loaded."""
        return experts

    def forward(
        self, x: Tensor, packed: ExpertWeights | QuantizedExperts, topk_ids: Tensor, topk_weights: Tensor
    ) -> Tensor:
        """See `MoEBackend.forward`."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        flat_ids = topk_ids.flatten()
        counts = flat_ids.bincount(minlength=self.need.num_experts).tolist()
        chosen_by = torch.split(flat_ids.argsort(stable=True), counts)
        weights = topk_weights.flatten().float()
        for expert, slots in enumerate(chosen_by):
            if counts[expert]:
                tokens = slots // self.need.top_k
                gate_up, down = packed.expert(expert, x.dtype)
                got = F.linear(silu_mul(F.linear(x[tokens], gate_up)), down)
                out.index_add_(0, tokens, got.float() * weights[slots, None])
        return out.to(x.dtype)
