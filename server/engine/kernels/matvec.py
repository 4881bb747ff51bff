"""Linear layers of few rows: every weight is read once, as near to the memory's speed as can be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.engine.kernels.activation import silu
from server.engine.kernels.runtime import begin, launch, release

MOST_VECTOR_ROWS = 4
"""Rows that `_vectors` takes: each costs an addition and a product a weight."""
MOST_ROWS = 64
"""Rows that `_tiles` takes."""


@dataclass(frozen=True)
class Shape:
    """How a product is cut."""

    outputs: int
    """A program's rows of the weight."""
    inputs: int
    """Columns that are read at once."""
    warps: int
    stages: int = 1
    """How many reads of `_tiles` are under way."""


@triton.jit
def _piece(
    weight: tl.tensor, row: tl.tensor, k: tl.tensor, IN: tl.constexpr, BLOCK_K: tl.constexpr, OUT: tl.constexpr
) -> tl.tensor:
    """[rows, BLOCK_K] of a weight from column k on; 0 beyond its ends."""
    column = k + tl.arange(0, BLOCK_K)
    inside = (row < OUT)[:, None] & (column < IN)[None, :]
    return tl.load(weight + row.to(tl.int64)[:, None] * IN + column[None, :], mask=inside, other=0.0)


@triton.jit
def _input(x: tl.tensor, k: tl.tensor, IN: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    column = k + tl.arange(0, BLOCK_K)
    return tl.load(x + column, mask=column < IN, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _put(
    total: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    first: tl.tensor,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    """Store a program's outputs for one row; of a gated product, gates and ups alternate in `total`."""
    if GATED:
        gate, up = tl.split(tl.reshape(total, [total.shape[0] // 2, 2]))
        at = first + tl.arange(0, total.shape[0] // 2)
        tl.store(out + at, (silu(gate) * up).to(out.dtype.element_ty), mask=at < OUT // 2)
    else:
        at = first + tl.arange(0, total.shape[0])
        if BIAS:
            total += tl.load(bias + at, mask=at < OUT, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=at < OUT)


@triton.jit
def _vectors(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """BLOCK_N outputs of 1 to 4 rows, without tensor cores; the next piece of the weight is read while one is used.

    The weight is contiguous [OUT, IN]. GATED: out is silu(first half) * second half.
    """
    release(CHAINED)
    n = tl.arange(0, BLOCK_N)
    if GATED:
        first = tl.program_id(0) * (BLOCK_N // 2)
        row = tl.where(first + n // 2 < OUT // 2, first + n // 2 + (n % 2) * (OUT // 2), OUT)
    else:
        first = tl.program_id(0) * BLOCK_N
        row = first + n
    width: tl.constexpr = OUT // 2 if GATED else OUT
    # A weight is never written while serving: its first piece is read before the input is there.
    piece = _piece(weight, row, 0, IN, BLOCK_K, OUT)
    begin(CHAINED)
    sum0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sum1 = sum0
    sum2 = sum0
    sum3 = sum0
    for k in range(0, IN, BLOCK_K):
        following = _piece(weight, row, k + BLOCK_K, IN, BLOCK_K, OUT)
        numbers = piece.to(tl.float32)
        sum0 += numbers * _input(x, k, IN, BLOCK_K)
        if ROWS > 1:
            sum1 += numbers * _input(x + x_stride, k, IN, BLOCK_K)
        if ROWS > 2:
            sum2 += numbers * _input(x + 2 * x_stride, k, IN, BLOCK_K)
        if ROWS > 3:
            sum3 += numbers * _input(x + 3 * x_stride, k, IN, BLOCK_K)
        piece = following
    _put(tl.sum(sum0, axis=1), out, bias, first, OUT, BIAS, GATED)
    if ROWS > 1:
        _put(tl.sum(sum1, axis=1), out + width, bias, first, OUT, BIAS, GATED)
    if ROWS > 2:
        _put(tl.sum(sum2, axis=1), out + 2 * width, bias, first, OUT, BIAS, GATED)
    if ROWS > 3:
        _put(tl.sum(sum3, axis=1), out + 3 * width, bias, first, OUT, BIAS, GATED)


@triton.jit(do_not_specialize=["rows"])
def _tiles(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """BLOCK_N outputs of up to BLOCK_M rows, by tensor cores; the weight is contiguous [OUT, IN]."""
    release(CHAINED)
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    x_at = x + m[None, :] * x_stride + column[:, None]
    weight_at = weight + n.to(tl.int64)[:, None] * IN + column[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    begin(CHAINED)
    for k in range(0, IN, BLOCK_K):
        numbers = tl.load(weight_at + k, mask=(n < OUT)[:, None] & (k + column < IN)[None, :], other=0.0)
        piece = tl.load(x_at + k, mask=(m < rows)[None, :] & (k + column < IN)[:, None], other=0.0)
        total = tl.dot(numbers, piece, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + n, mask=n < OUT, other=0.0).to(tl.float32)[:, None]
    inside = (n < OUT)[:, None] & (m < rows)[None, :]
    tl.store(out + m[None, :] * OUT + n[:, None], total.to(out.dtype.element_ty), mask=inside)


def vectors(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape, *, gated: bool = False) -> Tensor:
    """X [1 to 4, in] @ weight [out, in].T + bias; with `gated` silu(first half) * second half of it, without bias."""
    rows, (outputs, inputs) = len(x), weight.shape
    out = torch.empty((rows, outputs // 2 if gated else outputs), dtype=x.dtype, device=x.device)
    _vectors[(triton.cdiv(outputs, shape.outputs),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        OUT=outputs,
        IN=inputs,
        ROWS=rows,
        BIAS=bias is not None,
        GATED=gated,
        BLOCK_N=shape.outputs,
        BLOCK_K=shape.inputs,
        num_warps=shape.warps,
        **launch(x.device),
    )
    return out


def tiles(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    """X [1 to 64, in] @ weight [out, in].T + bias."""
    rows, (outputs, inputs) = len(x), weight.shape
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    _tiles[(triton.cdiv(outputs, shape.outputs),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        x.stride(0),
        OUT=outputs,
        IN=inputs,
        BIAS=bias is not None,
        BLOCK_M=16 if rows <= 16 else 32 if rows <= 32 else 64,
        BLOCK_N=shape.outputs,
        BLOCK_K=shape.inputs,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **launch(x.device),
    )
    return out
