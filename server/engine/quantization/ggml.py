"""Blocks of a GGUF file, kept as they are: 32 columns of a row share a scale, and perhaps a minimum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from server.checkpoint.gguf_types import GGUF_TYPES
from server.engine.loading.dequantize import blocks_of, dequantize, q4_k_scales
from server.engine.quantization.format import Family, TensorSpec

GgmlType = Literal["Q4_0", "Q4_1", "Q4_K", "Q8_0"]
KEPT: tuple[GgmlType, ...] = ("Q4_0", "Q4_1", "Q4_K", "Q8_0")
"""Types that are affine in groups of 32 columns."""
_SIZES = {kind.name: kind for kind in GGUF_TYPES.values()}


class Affine(NamedTuple):
    """W = code * scale + minimum, by groups of 32 columns."""

    codes: Tensor
    """[rows, columns]: uint8 of 0 to 15, or int8."""
    scales: Tensor
    """float32 [rows, columns / 32]."""
    minimums: Tensor | None
    """The same; None where codes are signed."""


@dataclass(frozen=True)
class GgmlBlocks:
    """One tensor, `weight`, of bytes."""

    type_name: GgmlType
    family: Family = field(default="ggml", init=False)

    @property
    def label(self) -> str:
        """q4_0, q4_1, q4_k, q8_0."""
        return self.type_name.lower()

    def tensors(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """See `QuantizedFormat.tensors`."""
        size = _SIZES[self.type_name]
        return {"weight": TensorSpec((rows, columns // size.block_size * size.block_bytes), torch.uint8)}

    def dequantize(self, parts: Mapping[str, Tensor], columns: int) -> Tensor:
        """See `QuantizedFormat.dequantize`."""
        data = parts["weight"]
        return dequantize(data.reshape(-1), self.type_name).view(*data.shape[:-1], columns)

    def affine(self, parts: Mapping[str, Tensor], columns: int) -> Affine:
        """Codes, scales and minimums of a single weight."""
        data = parts["weight"]
        rows = len(data)
        blocks = blocks_of(data.reshape(-1), self.type_name)
        if self.type_name == "Q8_0":
            return Affine(blocks[:, 2:].view(torch.int8).reshape(rows, columns), _halves(blocks, 0, rows), None)
        if self.type_name == "Q4_K":
            packed = blocks[:, 16:].reshape(-1, 4, 32)
            scales, minimums = q4_k_scales(blocks)
            codes = torch.cat((packed & 15, packed >> 4), -1).view(rows, columns)
            return Affine(codes, scales.view(rows, -1), -minimums.view(rows, -1))
        packed = blocks[:, 2 if self.type_name == "Q4_0" else 4 :]
        codes = torch.cat((packed & 15, packed >> 4), -1).view(rows, columns)
        scales = _halves(blocks, 0, rows)
        return Affine(codes, scales, -8 * scales if self.type_name == "Q4_0" else _halves(blocks, 2, rows))


def _halves(blocks: Tensor, start: int, rows: int) -> Tensor:
    """The float16 number at a byte of each block, as float32 [rows, blocks a row]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float().view(rows, -1)
