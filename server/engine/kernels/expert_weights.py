"""The layout in which the expert kernels read weights, and how stored formats are brought into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from server.engine.moe.base import ExpertWeights, QuantizedExperts
from server.engine.quantization.format import UNQUANTIZED, QuantizedFormat, WeightFormat
from server.engine.quantization.fp8 import Fp8
from server.engine.quantization.int4 import OFFSET, Int4
from server.engine.quantization.nvfp4 import GROUP as NVFP4_GROUP
from server.engine.quantization.nvfp4 import Nvfp4
from server.engine.quantization.stored import QuantizedTensors

RUN = 32
"""Columns that 16 bytes of 4-bit codes hold: the first 16 in the low halves, the others in the high ones."""
BLOCK_STEP = 32
"""Scales of blocks must stand for whole multiples of this many rows and columns."""

Kind = Literal["float", "fp8", "fp8_block", "int4", "fp4"]


@dataclass(frozen=True)
class Stack:
    """One projection of all experts of a layer; gate and up are two halves of one.

    W = codes, times `fine` (with 4 bits: of a group of columns of a row; fp8_block: of a block), minus `shifts`, times
    `coarse` (of a row or a whole half).
    """

    kind: Kind
    codes: Tensor
    """[E, rows, columns] in a floating type, or uint8 [E, rows, columns / 2] in runs of RUN columns."""
    rows: int
    columns: int
    halves: int
    """2 for gate and up, which have coarse scales and blocks of their own."""
    fine: Tensor | None = None
    """4 bits: [E, rows, columns / group]. Blocks: fp32 [E, halves, block rows, block columns]."""
    group: int = 0
    """Columns that share a fine scale."""
    block_rows: int = 0
    """Rows that do; 0 but for fp8_block."""
    shifts: Tensor | None = None
    """int4 with zero points: [E, rows, columns / group], (zero - 8) * scale."""
    coarse: Tensor | None = None
    """fp32 [E, halves] or [E, rows]."""


def unpackable(format: WeightFormat, sizes: tuple[tuple[str, int], ...]) -> str | None:
    """Why the kernels cannot read a format with experts of these sizes; None when they can.

    Args:
        format: how they are stored.
        sizes: names and numbers of the columns of both projections.
    """
    if isinstance(format, Fp8):
        if format.granularity == "block" and any(size % BLOCK_STEP for size in format.block):
            return f"blocks of {format.block[0]} x {format.block[1]} (multiples of {BLOCK_STEP} each)"
        return None
    if isinstance(format, Int4 | Nvfp4):
        for name, size in sizes:
            if size % RUN:
                return f"{name} {size} with 4-bit weights (it must be a multiple of {RUN})"
            group = _group(format, size)
            if size % group or (group % RUN and group != NVFP4_GROUP):
                return f"{name} {size} in groups of {group} columns (whole ones, multiples of {RUN})"
        return None
    return None if format == UNQUANTIZED else f"experts stored as {format.label}"


def stacks(experts: ExpertWeights | QuantizedExperts, dtype: torch.dtype) -> tuple[Stack, Stack]:
    """Gate and up, and down, as the kernels read them; the given memory is kept where it can be.

    Args:
        experts: as loaded.
        dtype: the model's, which the scales of 4-bit integers are rounded to.
    """
    if isinstance(experts, ExpertWeights):
        (_, rows, columns), (_, down_rows, down_columns) = experts.w13.shape, experts.w2.shape
        return (
            Stack("float", experts.w13, rows, columns, 2),
            Stack("float", experts.w2, down_rows, down_columns, 1),
        )
    return quantized_stack(experts.gate_up, 2, dtype), quantized_stack(experts.down, 1, dtype)


def quantized_stack(stored: QuantizedTensors, halves: int, dtype: torch.dtype) -> Stack:
    """One projection's weights, stored as [E, …], or [E, halves, …] with two halves."""
    format: QuantizedFormat = stored.format
    rows, columns, parts = stored.rows * halves, stored.columns, stored.parts
    if isinstance(format, Fp8):
        codes = _joined(parts["weight"], rows)
        scale = parts[format.scale]
        experts = len(codes)
        if format.granularity == "block":
            down, across = (-(-size // step) for size, step in zip((stored.rows, columns), format.block, strict=True))
            fine = scale.reshape(experts, halves, down, across).float().contiguous()
            return Stack("fp8_block", codes, rows, columns, halves, fine, format.block[1], format.block[0])
        return Stack("fp8", codes, rows, columns, halves, coarse=scale.reshape(experts, -1).float().contiguous())
    if isinstance(format, Nvfp4):
        scale = parts[format.tensor_scale].float()
        coarse = 1.0 / scale if format.layout == "compressed-tensors" else scale
        coarse = coarse.reshape(len(scale), halves).contiguous()
        codes = _in_runs(_joined(parts[format.packed], rows))
        fine = _joined(parts["weight_scale"], rows)
        return Stack(
            "fp4",
            codes,
            rows,
            columns,
            halves,
            fine,
            NVFP4_GROUP,
            coarse=coarse.reshape(len(codes), halves).contiguous(),
        )
    if isinstance(format, Int4):
        codes = _in_runs(_joined(parts["weight_packed"].contiguous().view(torch.uint8), rows))
        scale = parts["weight_scale"]
        shifts = None
        if not format.symmetric:
            shifts = _joined((format.zeros(parts) - OFFSET) * scale, rows).to(dtype)
        fine = _joined(scale, rows).to(dtype)
        return Stack("int4", codes, rows, columns, halves, fine, _group(format, columns), shifts=shifts)
    raise TypeError(f"the expert kernels do not read {format.label}")


def _group(format: Int4 | Nvfp4, columns: int) -> int:
    if isinstance(format, Nvfp4):
        return NVFP4_GROUP
    return format.group_size or columns


def _joined(part: Tensor, rows: int) -> Tensor:
    """[E, halves, rows / halves, n] or [E, rows, n] -> contiguous [E, rows, n]."""
    return part.reshape(part.shape[0], rows, part.shape[-1]).contiguous()


def _in_runs(codes: Tensor) -> Tensor:
    """Bytes of two neighbours, the even column in the low half -> runs of RUN columns; expert by expert."""
    out = torch.empty_like(codes)
    for old, new in zip(codes, out, strict=True):
        columns = torch.stack((old & 15, old >> 4), -1).view(old.shape[0], -1, 2, RUN // 2)
        new.copy_((columns[:, :, 0] | columns[:, :, 1] << 4).flatten(1))
    return out
