"""4-bit integer weights with a scale, and perhaps a zero point, for each group of a row (pack-quantized)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from server.engine.quantization.format import Family, TensorSpec

PER_WORD = 8
"""Codes in an int32; the first one lies in the lowest bits."""
OFFSET = 8
"""Added to signed numbers, -8 to 7, to make the codes 0 to 15; to zero points, too."""


@dataclass(frozen=True)
class Int4:
    """W = (code - zero) * scale, where a symmetric format has zero = 8 everywhere."""

    group_size: int | None
    """Columns that share a scale; None when a whole row does."""
    symmetric: bool = True
    family: Family = field(default="int4", init=False)

    @property
    def label(self) -> str:
        """int4_g32, int4_channel …; asymmetric ones end in _asym."""
        groups = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"int4_{groups}" + ("" if self.symmetric else "_asym")

    def groups(self, columns: int) -> int:
        """Scales in a row."""
        return 1 if self.group_size is None else -(-columns // self.group_size)

    def tensors(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """See `QuantizedFormat.tensors`."""
        groups = self.groups(columns)
        specs = {
            "weight_packed": TensorSpec((rows, -(-columns // PER_WORD)), torch.int32),
            "weight_scale": TensorSpec((rows, groups), torch.float32),
            "weight_shape": TensorSpec((2,), torch.int64, expected=(rows, columns)),
        }
        if not self.symmetric:
            # Unlike the weights, packed along the rows.
            specs["weight_zero_point"] = TensorSpec((-(-rows // PER_WORD), groups), torch.int32)
        return specs

    def codes(self, parts: Mapping[str, Tensor], columns: int) -> Tensor:
        """int32 [..., rows, columns] of 0 to 15."""
        return unpack(parts["weight_packed"])[..., :columns]

    def zeros(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The codes that mean 0: float32 [..., rows, groups]."""
        scale = parts["weight_scale"]
        if self.symmetric:
            return torch.full_like(scale, OFFSET)
        return unpack(parts["weight_zero_point"].mT)[..., : scale.shape[-2]].mT.float()

    def dequantize(self, parts: Mapping[str, Tensor], columns: int) -> Tensor:
        """See `QuantizedFormat.dequantize`."""
        values = self.codes(parts, columns).float()
        size = self.group_size or columns
        zeros, scales = (
            each.repeat_interleave(size, -1)[..., :columns] for each in (self.zeros(parts), parts["weight_scale"])
        )
        return values.sub_(zeros).mul_(scales)


def unpack(words: Tensor) -> Tensor:
    """int32 [..., n] to int32 [..., 8 * n] of 0 to 15."""
    shifts = torch.arange(0, 32, 32 // PER_WORD, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """Integers [..., columns] of 0 to 15 to int32 [..., ceil(columns / 8)], padded with 0."""
    padded = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[-1] % PER_WORD))
    shifts = torch.arange(0, 32, 32 // PER_WORD, device=codes.device)
    words = (padded.view(*padded.shape[:-1], -1, PER_WORD) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
