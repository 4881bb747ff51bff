"""4-bit experts by Triton kernels: weights are unpacked in registers, activations stay in 16 bits."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from server.engine.attention.base import Unsupported
from server.engine.kernels.available import fp8_problem
from server.engine.moe.base import ExpertWeights, MoENeed, PackedExperts, QuantizedExperts
from server.engine.moe.triton import kernels_problem


class TritonW4A16MoE:
    """NVFP4 and 4-bit integer experts: memory and reads are those of 4-bit weights. It never synchronises."""

    name: ClassVar[str] = "triton_w4a16"
    capturable: ClassVar[bool] = True

    @classmethod
    def supports(cls, need: MoENeed) -> Unsupported | None:
        """Quantised experts only, on CUDA or in triton's interpreter; NVFP4 from sm_89 on, for its e4m3 scales."""
        if need.weights.family == "none":
            return Unsupported("unquantised experts (it takes 4-bit ones only, nvfp4 and int4)")
        if need.weights.family not in ("int4", "nvfp4"):
            return Unsupported(f"experts stored as {need.weights.label} (it takes 4-bit ones only, nvfp4 and int4)")
        problem = kernels_problem(need)
        if problem is None and need.weights.family == "nvfp4" and need.device.type == "cuda":
            problem = fp8_problem(need.device)  # of its scales
        return None if problem is None else Unsupported(problem)

    def __init__(self, need: MoENeed) -> None:
        from server.engine.kernels import experts

        self.need = need
        self._experts = experts

    def pack(self, experts: ExpertWeights | QuantizedExperts) -> PackedExperts:
        """Codes are put in the kernels' order, expert by expert."""
        from server.engine.kernels.expert_weights import stacks

        if isinstance(experts, ExpertWeights):
            raise TypeError(f"{self.name} cannot compute unquantised experts")
        return self._experts.Packed(*stacks(experts, self.need.dtype))

    def forward(self, x: Tensor, packed: PackedExperts, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `MoEBackend.forward`."""
        return self._experts.experts_forward(x, packed, topk_ids, topk_weights)
