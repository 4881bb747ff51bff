"""From a checkpoint's tensors to the layout of the C products, without loss where they are affine in groups of 32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from server.engine.cpu.weights import BLOCK, PackedWeight, pack_eight_bits, pack_four_bits, pack_sixteen_bits
from server.engine.quantization.format import WeightFormat
from server.engine.quantization.ggml import GgmlBlocks
from server.engine.quantization.int4 import Int4
from server.engine.quantization.stored import QuantizedTensors
from server.errors import UserError

PARTS_OF_A_SCALE = 2.0**-10
"""Scales that float16 holds less exactly than so are not kept in it; codes have 16 or 256 values."""


def keeps_codes(format: WeightFormat, columns: int) -> bool:
    """Whether weights of a format can be multiplied as they are stored."""
    if columns % BLOCK:
        return False
    if isinstance(format, Int4):
        return format.groups(columns) * (format.group_size or columns) == columns and not (
            (format.group_size or columns) % BLOCK
        )
    return isinstance(format, GgmlBlocks)


def pack_quantized(shards: Sequence[QuantizedTensors], bias: Tensor | None, where: str) -> PackedWeight | None:
    """Stack the rows of weights that share format and columns.

    Args:
        shards: of a format that `keeps_codes`.
        bias: of all rows.
        where: the modules, for errors.

    Returns:
        The weight; None where float16 cannot hold its scales.

    Raises:
        UserError: a scale is NaN or infinite.
    """
    columns = shards[0].columns
    codes, scales, minimums = [], [], []
    for shard in shards:
        format = shard.format
        if isinstance(format, GgmlBlocks):
            affine = format.affine(shard.parts, columns)
            codes.append(affine.codes)
            scales.append(affine.scales)
            if affine.minimums is not None:
                minimums.append(affine.minimums)
        else:
            assert isinstance(format, Int4)
            scale = shard.parts["weight_scale"]
            repeats = columns // BLOCK // scale.shape[1]
            codes.append(format.codes(shard.parts, columns).to(torch.uint8))
            scales.append(scale.repeat_interleave(repeats, 1))
            minimums.append((-format.zeros(shard.parts) * scale).repeat_interleave(repeats, 1))
    all_scales, all_codes = torch.cat(scales), torch.cat(codes)
    all_minimums = torch.cat(minimums) if minimums else None
    for values in (all_scales, all_minimums):
        if values is None:
            continue
        if not bool(values.isfinite().all()):
            raise UserError(f"{where}: the tensors hold scales that are NaN or infinite")
        if not _fits_half(values):
            return None
    if all_minimums is None:
        return pack_eight_bits(all_codes, all_scales, bias)
    return pack_four_bits(all_codes, all_scales, all_minimums, bias)


def pack_plain(weight: Tensor, bias: Tensor | None) -> PackedWeight | None:
    """A weight in the model's dtype; None where the products do not take it."""
    if weight.dtype is not torch.bfloat16 or weight.shape[1] % BLOCK:
        return None
    return pack_sixteen_bits(weight, bias)


def pack_rounded(weight: Tensor, bias: Tensor | None) -> PackedWeight | None:
    """A weight rounded to 8 bits, with a scale for every 32 columns; None where float16 cannot hold its scales.

    Args:
        weight: [rows, columns], columns a multiple of 32.
        bias: [rows], any dtype.
    """
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1) / 127
    kept = scales.to(torch.float16).float()
    # Where a block's scale is far below the largest one, little is lost of the product if it is lost: far less than the
    # rounding of the others loses.
    if not bool(((kept - scales).abs() <= scales * 2.0**-8 + scales.max() * 2.0**-12).all()):
        return None
    codes = (blocks / kept.where(kept > 0, 1.0)[..., None]).round().clamp(-127, 127)
    codes = codes.where(kept[..., None] > 0, 0.0)
    return pack_eight_bits(codes.flatten(1).to(torch.int8), kept, bias)


def _fits_half(values: Tensor) -> bool:
    lost = (values.to(torch.float16).float() - values).abs()
    # A scale far below the largest one adds nothing that anyone could see.
    floor = values.abs().max() * 2.0**-12
    return bool((lost <= values.abs().clamp(min=floor) * PARTS_OF_A_SCALE).all())
