"""Fused experts by Triton kernels: CUDA's default. triton is imported when the backend is chosen, not before."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from server.engine.attention.base import Unsupported
from server.engine.kernels.available import fp8_problem, triton_problem
from server.engine.kernels.expert_weights import unpackable
from server.engine.moe.base import ExpertWeights, MoENeed, PackedExperts, QuantizedExperts

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FAMILIES = ("none", "fp8")


def kernels_problem(need: MoENeed) -> str | None:
    """Why the expert kernels cannot serve the need, whatever backend asks; None when they can."""
    if need.dtype not in FLOATS:
        return f"dtype {need.dtype} (it takes float32, float16 and bfloat16)"
    sizes = (("hidden size", need.hidden_size), ("expert width", need.intermediate_size))
    return unpackable(need.weights, sizes) or triton_problem(need.device)


class TritonMoE:
    """Unquantised and 8-bit experts: matrix-vector products for few tokens, grouped products for many.

    It never synchronises with the device, and its sums have one order: no atomics.
    """

    name: ClassVar[str] = "triton"
    capturable: ClassVar[bool] = True

    @classmethod
    def supports(cls, need: MoENeed) -> Unsupported | None:
        """Unquantised and fp8 experts, on CUDA or in triton's interpreter; fp8 from sm_89 on."""
        if need.weights.family not in FAMILIES:
            return Unsupported(f"experts stored as {need.weights.label} (it takes unquantised and fp8 ones)")
        problem = kernels_problem(need)
        if problem is None and need.weights.family == "fp8" and need.device.type == "cuda":
            problem = fp8_problem(need.device)
        return None if problem is None else Unsupported(problem)

    def __init__(self, need: MoENeed) -> None:
        from server.engine.kernels import experts

        self.need = need
        self._experts = experts

    def pack(self, experts: ExpertWeights | QuantizedExperts) -> PackedExperts:
        """Unquantised and fp8 weights stay where they are."""
        from server.engine.kernels.expert_weights import stacks

        if isinstance(experts, ExpertWeights) != (self.need.weights.family == "none"):
            raise TypeError(f"{self.name} was built for {self.need.weights.label} experts")
        return self._experts.Packed(*stacks(experts, self.need.dtype))

    def forward(self, x: Tensor, packed: PackedExperts, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `MoEBackend.forward`."""
        return self._experts.experts_forward(x, packed, topk_ids, topk_weights)
