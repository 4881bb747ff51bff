"""8-bit floating-point weights (e4m3) with a scale for the tensor, for each row or for each block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from server.engine.quantization.format import Family, TensorSpec

BLOCK = (128, 128)


@dataclass(frozen=True)
class Fp8:
    """W = weight * scale. It is a product also where the scale's name ends in `_inv`."""

    granularity: Literal["tensor", "channel", "block"]
    scale: Literal["weight_scale", "weight_scale_inv"] = "weight_scale"
    scale_dims: int = 2
    """Dimensions of the stored scale: tensor 0 to 2, channel 1 or 2, block 2 or 4 (ones between and after)."""
    block: tuple[int, int] = BLOCK
    """Rows and columns of a block; the last ones of a weight may be smaller."""
    family: Family = field(default="fp8", init=False)

    @property
    def label(self) -> str:
        """fp8_tensor, fp8_channel, fp8_block; with the size of the blocks if it is not 128 x 128."""
        size = f"_{self.block[0]}x{self.block[1]}" if self.granularity == "block" and self.block != BLOCK else ""
        return f"fp8_{self.granularity}{size}"

    def tensors(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """See `QuantizedFormat.tensors`."""
        return {
            "weight": TensorSpec((rows, columns), torch.float8_e4m3fn),
            self.scale: TensorSpec(self._scale_shape(rows, columns), torch.float32),
        }

    def _scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        if self.granularity == "tensor":
            return (1,) * self.scale_dims
        if self.granularity == "channel":
            return (rows, 1)[: self.scale_dims]
        down, across = -(-rows // self.block[0]), -(-columns // self.block[1])
        return (down, across) if self.scale_dims == 2 else (down, 1, across, 1)

    def dequantize(self, parts: Mapping[str, Tensor], columns: int) -> Tensor:
        """See `QuantizedFormat.dequantize`."""
        codes = parts["weight"]
        *stack, rows, _ = codes.shape
        scale = parts[self.scale]
        if self.granularity == "block":
            down, across = (-(-size // step) for size, step in zip((rows, columns), self.block, strict=True))
            scale = scale.reshape(*stack, down, across).repeat_interleave(self.block[0], -2)[..., :rows, :]
            scale = scale.repeat_interleave(self.block[1], -1)[..., :columns]
        else:
            scale = scale.reshape(*stack, rows if self.granularity == "channel" else 1, 1)
        return codes.float().mul_(scale)
