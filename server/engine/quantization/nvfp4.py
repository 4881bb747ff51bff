"""4-bit floating-point weights (e2m1) with an e4m3 scale for each 16 columns and one scale for the tensor (NVFP4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from server.engine.quantization.format import Family, TensorSpec

GROUP = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 to 7; codes 8 to 15 are their negatives."""


@dataclass(frozen=True)
class Nvfp4:
    """W = number * group scale * tensor scale (modelopt), or / tensor scale (compressed-tensors)."""

    layout: Literal["compressed-tensors", "modelopt"]
    scale_dims: int = 1
    """Dimensions of the stored tensor scale, 0 or 1."""
    family: Family = field(default="nvfp4", init=False)
    label: str = field(default="nvfp4", init=False)

    @property
    def packed(self) -> str:
        """Name of the codes, two in a byte, the even column in the low bits."""
        return "weight_packed" if self.layout == "compressed-tensors" else "weight"

    @property
    def tensor_scale(self) -> str:
        """Name of the tensor's own scale."""
        return "weight_global_scale" if self.layout == "compressed-tensors" else "weight_scale_2"

    def tensors(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """See `QuantizedFormat.tensors`."""
        return {
            self.packed: TensorSpec((rows, -(-columns // 2)), torch.uint8),
            "weight_scale": TensorSpec((rows, -(-columns // GROUP)), torch.float8_e4m3fn),
            self.tensor_scale: TensorSpec(
                (1,) * self.scale_dims, torch.float32, divisor=self.layout == "compressed-tensors"
            ),
        }

    def dequantize(self, parts: Mapping[str, Tensor], columns: int) -> Tensor:
        """See `QuantizedFormat.dequantize`."""
        codes = parts[self.packed]
        *stack, _, _ = codes.shape
        tensor_scale = parts[self.tensor_scale].reshape(*stack, 1, 1)
        scale = parts["weight_scale"].float()
        scale = scale / tensor_scale if self.layout == "compressed-tensors" else scale * tensor_scale
        values = unpack(codes)[..., :columns]
        return values.mul_(scale.repeat_interleave(GROUP, -1)[..., :columns])


def unpack(packed: Tensor) -> Tensor:
    """uint8 [..., n] to float32 [..., 2 * n]."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return table[codes.int()]
