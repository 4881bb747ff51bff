"""Linear layers whose weights stay in 8 or 4 bits: unpacked in registers, read as they are stored.

The weight is one expert of the expert kernels' layout, and the products are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.engine.kernels.available import fp8_problem
from server.engine.kernels.expert_weights import Stack, quantized_stack, unpackable
from server.engine.kernels.experts import compute_type, constants, parts
from server.engine.kernels.experts_grouped import product
from server.engine.kernels.experts_matvec import row_sums
from server.engine.kernels.runtime import begin, launch, power_of_two, release
from server.engine.quantization.fp8 import Fp8
from server.engine.quantization.stored import QuantizedTensors

MOST_VECTOR_ROWS = 4
"""Rows that are multiplied without tensor cores: each reads the whole weight again, from the L2 cache at best."""


def unpackable_linear(shards: Sequence[QuantizedTensors], device: torch.device) -> str | None:
    """Why the kernels cannot compute with a weight of these shards, one below the other; None when they can."""
    first = shards[0]
    problem = unpackable(first.format, (("input width", first.columns),))
    if problem is None and first.format.family in ("fp8", "nvfp4") and device.type == "cuda":
        # The scales of NVFP4 are e4m3, too.
        problem = fp8_problem(device)
    if problem is None and isinstance(first.format, Fp8) and first.format.granularity == "block":
        step = first.format.block[0]
        for shard in shards[:-1]:
            if shard.rows % step:
                return f"a shard of {shard.rows} rows in blocks of {step}"
    return problem


def pack(shards: Sequence[QuantizedTensors], dtype: torch.dtype) -> Stack:
    """The shards as one weight, [1, rows, columns].

    Args:
        shards: of one format; each keeps its own scales.
        dtype: the model's, which the scales of 4-bit integers are rounded to.
    """
    stacks = [_stack(shard, dtype) for shard in shards]
    first = stacks[0]

    def joined(name: str, dim: int) -> Tensor | None:
        found: list[Tensor] = [getattr(stack, name) for stack in stacks if getattr(stack, name) is not None]
        return torch.cat(found, dim) if found else None

    codes = joined("codes", 1)
    assert codes is not None
    return replace(
        first,
        codes=codes,
        rows=sum(stack.rows for stack in stacks),
        fine=joined("fine", 2 if first.block_rows else 1),
        shifts=joined("shifts", 1),
        coarse=joined("coarse", 1),
    )


def _stack(shard: QuantizedTensors, dtype: torch.dtype) -> Stack:
    stack = quantized_stack(replace(shard, parts={name: part[None] for name, part in shard.parts.items()}), 1, dtype)
    coarse = stack.coarse
    if coarse is None:
        return stack
    # One scale a row, whatever the shard's own granularity was.
    return replace(stack, coarse=coarse.reshape(1, -1).expand(1, stack.rows).contiguous())


def packed_linear(x: Tensor, weight: Stack, bias: Tensor | None = None) -> Tensor:
    """X [T, columns] @ weight.T + bias, [T, rows] in the dtype of x.

    Args:
        x: rows of any stride.
        weight: from `pack`.
        bias: [rows].
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = len(x)
    out = torch.empty((rows, weight.rows), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    options = {**constants(weight), "BIAS": bias is not None, **launch(x.device)}
    memory = (*parts(weight), weight.codes if bias is None else bias, out, x.stride(0))
    if rows <= MOST_VECTOR_ROWS:
        columns = min(2048, max(64, power_of_two(weight.columns)))
        _vectors[(triton.cdiv(weight.rows, 4), rows)](x, *memory, BLOCK_N=4, BLOCK_K=columns, num_warps=4, **options)
        return out
    cut_rows, outputs, columns, warps, stages = _cut(rows, x.dtype)
    if weight.kind == "fp8_block":
        columns = min(columns, weight.group & -weight.group)
    grid = (triton.cdiv(weight.rows, outputs), triton.cdiv(rows, cut_rows))
    _tiles[grid](
        x,
        *memory,
        rows,
        BLOCK_M=cut_rows,
        BLOCK_N=outputs,
        BLOCK_K=columns,
        COMPUTE=compute_type(x.dtype),
        num_warps=warps,
        num_stages=stages,
        **options,
    )
    return out


def _cut(rows: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Rows, outputs, columns of a tile, warps, stages: those of the grouped expert products at such loads."""
    if dtype == torch.float32:
        return 16, 32, 32, 4, 2
    if rows <= 16:
        return 16, 64, 128, 4, 3
    if rows <= 64:
        return 64, 128, 64, 4, 4
    return 128, 128, 64, 8, 3


@triton.jit
def _vectors(
    x: tl.tensor,
    codes: tl.tensor,
    fine: tl.tensor,
    shifts: tl.tensor,
    coarse: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HALF_BLOCKS: tl.constexpr,
    SHIFTED: tl.constexpr,
    COARSE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """BLOCK_N outputs of one row of x."""
    release(CHAINED)
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    row = first + tl.arange(0, BLOCK_N)
    block_row = first // BLOCK_ROWS if BLOCK_ROWS else 0
    begin(CHAINED)
    lanes = row_sums(
        x + token * x_stride, codes, fine, shifts, row, row < 0, block_row,
        IN, OUT, KIND, GROUP, 0, SHIFTED, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    total = tl.sum(lanes, axis=1)
    if COARSE:
        total *= tl.load(coarse + row, mask=row < OUT, other=0.0)
    if BIAS:
        total += tl.load(bias + row, mask=row < OUT, other=0.0).to(tl.float32)
    tl.store(out + token * OUT + row, total.to(out.dtype.element_ty), mask=row < OUT)


@triton.jit(do_not_specialize=["rows"])
def _tiles(
    x: tl.tensor,
    codes: tl.tensor,
    fine: tl.tensor,
    shifts: tl.tensor,
    coarse: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HALF_BLOCKS: tl.constexpr,
    SHIFTED: tl.constexpr,
    COARSE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """BLOCK_N outputs of BLOCK_M rows, by tensor cores."""
    release(CHAINED)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    block_row = n // BLOCK_ROWS if BLOCK_ROWS else n
    begin(CHAINED)
    total = product(
        x + m * x_stride, m < rows, codes, fine, shifts, n, block_row,
        IN, OUT, KIND, GROUP, SHIFTED, BLOCK_M, BLOCK_N, BLOCK_K, COMPUTE,
    )  # fmt: skip
    if COARSE:
        total *= tl.load(coarse + n, mask=n < OUT, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    out_at = out + m[:, None] * OUT + n[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < OUT)[None, :])
