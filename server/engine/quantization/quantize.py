"""Plain weights to quantised ones, by rounding each number to the nearest one that its format has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from server.engine.quantization.format import QuantizedFormat
from server.engine.quantization.fp8 import Fp8
from server.engine.quantization.int4 import OFFSET, Int4, pack
from server.engine.quantization.nvfp4 import E2M1, GROUP, Nvfp4

FP8_MAX = 448.0
E2M1_MAX = E2M1[-1]
INT4_STEPS = 15


def quantize(weight: Tensor, format: QuantizedFormat) -> dict[str, Tensor]:
    """The tensors of a weight as a checkpoint holds them.

    Args:
        weight: [rows, columns], any floating dtype; integer formats' scales are stored in it, as producers do.
        format: the format to round to.

    Returns:
        By the last part of their names; `format.dequantize` reads them.

    Raises:
        TypeError: a format that this function does not know.
    """
    if isinstance(format, Fp8):
        return _fp8(weight.float(), format)
    if isinstance(format, Int4):
        return _int4(weight, format)
    if isinstance(format, Nvfp4):
        return _nvfp4(weight.float(), format)
    raise TypeError(f"no way to quantise to {format.label}")


def _fp8(weight: Tensor, format: Fp8) -> dict[str, Tensor]:
    rows, columns = weight.shape
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": format.block}[format.granularity]
    padded = F.pad(weight.abs(), (0, -columns % width, 0, -rows % height))
    largest = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width).amax((1, 3))
    scale = _nonzero(largest / FP8_MAX)
    spread = scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    codes = (weight / spread).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return {"weight": codes, format.scale: scale.reshape(format.tensors(rows, columns)[format.scale].shape)}


def _int4(weight: Tensor, format: Int4) -> dict[str, Tensor]:
    rows, columns = weight.shape
    size = format.group_size or columns
    numbers = weight.float()
    # Padding repeats the last column, which changes no group's extremes.
    grouped = F.pad(numbers[None], (0, -columns % size), mode="replicate")[0].view(rows, -1, size)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    steps = 2 * torch.maximum(-low, high) if format.symmetric else high - low
    scale = _nonzero((steps / INT4_STEPS).to(weight.dtype))
    zero = torch.full_like(low, OFFSET) if format.symmetric else (-low / scale.float()).round().clamp(0, INT4_STEPS)
    spread, offset = (each.repeat_interleave(size, 1)[:, :columns] for each in (scale.float(), zero))
    codes = ((numbers / spread).round() + offset).clamp(0, INT4_STEPS)
    parts = {"weight_packed": pack(codes), "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}
    if not format.symmetric:
        parts["weight_zero_point"] = pack(zero.T).T.contiguous()
    return parts


def _nvfp4(weight: Tensor, format: Nvfp4) -> dict[str, Tensor]:
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % GROUP))
    grouped = padded.view(rows, -1, GROUP)
    whole = _nonzero(grouped.abs().amax() / (FP8_MAX * E2M1_MAX))
    scale = (grouped.abs().amax(-1) / E2M1_MAX / whole).to(torch.float8_e4m3fn)
    divisor = _nonzero(scale.float() * whole)
    middles = torch.tensor([(a + b) / 2 for a, b in zip(E2M1, E2M1[1:], strict=False)], device=weight.device)
    values = grouped / divisor.unsqueeze(-1)
    codes = torch.bucketize(values.abs(), middles) + 8 * (values < 0)
    codes = codes.view(rows, -1)[:, : columns + columns % 2].to(torch.uint8)
    stored = (1 / whole if format.layout == "compressed-tensors" else whole).reshape((1,) * format.scale_dims)
    return {format.packed: codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale, format.tensor_scale: stored}


def _nonzero(scale: Tensor) -> Tensor:
    """Where all numbers are 0, any scale will do but 0."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))
