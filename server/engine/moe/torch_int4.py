"""4-bit integer experts on the CPU, multiplied as they are: torch's packed product unpacks them in registers."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar

import torch
from torch import Tensor

from server.engine.attention.base import Unsupported
from server.engine.layers.activation import silu_mul
from server.engine.moe.base import ExpertWeights, MoENeed, QuantizedExperts
from server.engine.quantization.int4 import OFFSET, Int4
from server.engine.quantization.stored import QuantizedTensors

GROUPS = (32, 64, 128, 256)
"""Columns of a scale that the product takes. Larger groups are taken as several with the same scale."""
ROWS = 16
"""The weight's rows must be a multiple of this."""
_INNER_TILES = 2  # has no meaning on the CPU, but must be one of the values for CUDA


@dataclass(frozen=True)
class PackedInt4:
    """One expert's projection in the product's layout."""

    codes: Tensor
    """uint8 [rows, columns / 2], in the order of the CPU's vector instructions."""
    scales_and_zeros: Tensor
    """[columns / group, rows, 2] in the model's dtype: W = (code - 8) * scale + zero."""
    group: int

    def __call__(self, x: Tensor) -> Tensor:
        """[T, columns] -> [T, rows]."""
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, self.group, self.scales_and_zeros)
        return product


@dataclass(frozen=True)
class PackedExpert:
    """One expert."""

    gate_up: PackedInt4
    down: PackedInt4


class TorchInt4MoE:
    """A loop over the experts that received tokens; memory and reads are those of 4-bit weights."""

    name: ClassVar[str] = "torch_int4"
    capturable: ClassVar[bool] = False

    @classmethod
    def supports(cls, need: MoENeed) -> Unsupported | None:
        """4-bit integers in groups of whole 32 columns, or a scale a row, on the CPU."""
        if not isinstance(need.weights, Int4):
            stored = (
                "unquantised experts" if need.weights.family == "none" else f"experts stored as {need.weights.label}"
            )
            return Unsupported(f"{stored} (it takes 4-bit integer ones only, int4)")
        if need.device.type != "cpu":
            return Unsupported(f"device {need.device.type} (it runs on cpu)")
        if need.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return Unsupported(f"dtype {need.dtype} (it takes float32, float16 and bfloat16)")
        for what, size in (("hidden size", need.hidden_size), ("expert width", need.intermediate_size)):
            if size % GROUPS[0]:
                return Unsupported(f"{what} {size} (it must be a multiple of {GROUPS[0]})")
            group = need.weights.group_size or size
            if group % GROUPS[0]:
                return Unsupported(f"groups of {group} columns (they must be a multiple of {GROUPS[0]})")
            if size % group:
                return Unsupported(f"{what} {size} in groups of {group} columns (the last one must be whole)")
        return None

    def __init__(self, need: MoENeed) -> None:
        self.need = need

    def pack(self, experts: ExpertWeights | QuantizedExperts) -> list[PackedExpert]:
        """One after the other, so that little is there twice; scales are rounded to the model's dtype."""
        if isinstance(experts, ExpertWeights):
            raise TypeError(f"{self.name} cannot compute unquantised experts")
        return [
            PackedExpert(
                _pack([experts.gate_up[index, 0], experts.gate_up[index, 1]], self.need.dtype),
                _pack([experts.down[index]], self.need.dtype),
            )
            for index in range(self.need.num_experts)
        ]

    def forward(self, x: Tensor, packed: list[PackedExpert], topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `MoEBackend.forward`."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        flat_ids = topk_ids.flatten()
        counts = flat_ids.bincount(minlength=self.need.num_experts).tolist()
        chosen_by = torch.split(flat_ids.argsort(stable=True), counts)
        weights = topk_weights.flatten().float()
        for expert, slots, count in zip(packed, chosen_by, counts, strict=True):
            if count:
                tokens = slots // self.need.top_k
                got = expert.down(silu_mul(expert.gate_up(x[tokens])))
                out.index_add_(0, tokens, got.float() * weights[slots, None])
        return out.to(x.dtype)


def _pack(weights: list[QuantizedTensors], dtype: torch.dtype) -> PackedInt4:
    """Stack the rows of weights that share their columns."""
    codes, scales, zeros = [], [], []
    columns = weights[0].columns
    for weight in weights:
        format = weight.format
        assert isinstance(format, Int4)
        scale = weight.parts["weight_scale"]
        codes.append(format.codes(weight.parts, columns))
        scales.append(scale)
        zeros.append((OFFSET - format.zeros(weight.parts)) * scale)
    stored_group = columns // scales[0].shape[1]
    group = gcd(stored_group, GROUPS[-1])
    pairs = torch.stack((torch.cat(scales), torch.cat(zeros)), -1).repeat_interleave(stored_group // group, 1)
    return PackedInt4(
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.cat(codes), _INNER_TILES),
        pairs.transpose(0, 1).to(dtype).contiguous(),
        group,
    )
