"""Experts through torch's grouped product: tokens sorted by expert, one call per projection."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from server.engine.attention.base import Unsupported
from server.engine.layers.activation import silu_mul
from server.engine.moe.base import ExpertWeights, MoENeed, QuantizedExperts
from server.engine.quantization.format import Unquantized


class GroupedMMMoE:
    """`torch.nn.functional.grouped_mm` over all experts; it never synchronises with the device."""

    name: ClassVar[str] = "grouped_mm"
    capturable: ClassVar[bool] = True

    @classmethod
    def supports(cls, need: MoENeed) -> Unsupported | None:
        """What the product takes: unquantised experts.

        On the CPU in all three dtypes, on CUDA from sm_90 in bf16 with rows of whole 16 bytes.
        """
        if not isinstance(need.weights, Unquantized):
            return Unsupported(f"experts stored as {need.weights.label} (it takes unquantised ones only)")
        if need.device.type == "cpu":
            if need.dtype in (torch.float32, torch.float16, torch.bfloat16):
                return None
            return Unsupported(f"dtype {need.dtype} (on the CPU it takes float32, float16 and bfloat16)")
        if need.device.type != "cuda":
            return Unsupported(f"device {need.device.type} (it runs on cpu and cuda)")
        if need.dtype is not torch.bfloat16:
            return Unsupported(f"dtype {need.dtype} (on CUDA it takes bfloat16)")
        capability = torch.cuda.get_device_capability(need.device)
        if capability < (9, 0):
            return Unsupported(f"compute capability {capability[0]}.{capability[1]} (it needs 9.0)")
        for what, size in (("hidden size", need.hidden_size), ("expert width", need.intermediate_size)):
            if size % 8:
                return Unsupported(f"{what} {size} (on CUDA it must be a multiple of 8)")
        return None

    def __init__(self, need: MoENeed) -> None:
        self.need = need
        self.experts = torch.arange(need.num_experts, device=need.device)

    def pack(self, experts: ExpertWeights | QuantizedExperts) -> ExpertWeights:
        """As loaded: the product reads transposed views."""
        if isinstance(experts, QuantizedExperts):
            raise TypeError(f"{self.name} cannot compute {experts.down.format.label} experts")
        return experts

    def forward(self, x: Tensor, packed: ExpertWeights, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `MoEBackend.forward`."""
        sorted_ids, order = topk_ids.flatten().sort(stable=True)
        # Where each expert's run of tokens ends; experts without tokens have empty runs.
        ends = torch.searchsorted(sorted_ids, self.experts, right=True).to(torch.int32)
        rows = x[order // self.need.top_k]
        hidden = silu_mul(F.grouped_mm(rows, packed.w13.transpose(1, 2), offs=ends))
        got = F.grouped_mm(hidden, packed.w2.transpose(1, 2), offs=ends)
        back = torch.empty_like(got).index_copy_(0, order, got).view(*topk_ids.shape, x.shape[1])
        return torch.bmm(topk_weights.to(x.dtype).unsqueeze(1), back).squeeze(1)
