"""Linear layers of few rows: every weight is read once, as near to the memory's speed as can be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.engine.kernels.activation import silu
from server.engine.kernels.runtime import begin, fetch, launch, release

MOST_VECTOR_ROWS = 4
"""Rows that `_vectors` takes: each costs an addition and a product a weight."""
MOST_ROWS = 64
"""Rows that `_tiles` takes."""
SMALLEST_TILE = 16
"""Outputs."""


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
    shares: int = 1
    """Programs of `_tiles` that share the inputs of one tile."""


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


FETCHED = 512
"""Columns of a weight that `_tiles` brings into the L2 cache while it waits for its input."""


@triton.jit(do_not_specialize=["rows"])
def _tiles(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    counters: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SHARE: tl.constexpr,
    SHARES: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FETCHED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """BLOCK_N outputs of up to BLOCK_M rows, by tensor cores; the weight is contiguous [OUT, IN].

    With several shares, each program takes SHARE of the inputs; the one that comes last adds up what all of them left
    in `parts` (fp32 [SHARES, BLOCK_M, tiles * BLOCK_N]), always in the same order. `counters` (int32, one a tile) are 0
    before and after. GATED as in `_vectors`.
    """
    release(CHAINED)
    tile = tl.program_id(0)
    share = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_N)
    if GATED:
        half: tl.constexpr = OUT // 2
        within = tile * (BLOCK_N // 2) + r // 2
        n = tl.where(within < half, within + (r % 2) * half, OUT)
    else:
        n = tile * BLOCK_N + r
    column = tl.arange(0, BLOCK_K)
    first = share * SHARE
    weight_at = weight + n.to(tl.int64)[:, None] * IN + (first + column)[None, :]
    line = first + tl.arange(0, FETCHED // 64) * 64
    # Beyond the ends lies the weight's start: an address must be good, even to be fetched.
    wanted = tl.where((n < OUT)[:, None] & (line < IN)[None, :], n.to(tl.int64)[:, None] * IN + line[None, :], 0)
    fetch(weight + wanted, CHAINED)
    x_at = x + m[None, :] * x_stride + (first + column)[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    begin(CHAINED)
    for k in range(0, SHARE, BLOCK_K):
        inside = first + k + column < IN
        numbers = tl.load(weight_at + k, mask=(n < OUT)[:, None] & inside[None, :], other=0.0)
        piece = tl.load(x_at + k, mask=(m < rows)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(numbers, piece, total, input_precision="ieee")
    last = True
    if SHARES > 1:
        width = tl.num_programs(0) * BLOCK_N
        at = parts + m[None, :] * width + (tile * BLOCK_N + r)[:, None]
        in_rows = (m < rows)[None, :] & (r < BLOCK_N)[:, None]
        tl.store(at + share * BLOCK_M * width, total, mask=in_rows)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        last = arrived == SHARES - 1
        if last:
            tl.store(counters + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for i in tl.static_range(SHARES):
                total += tl.load(at + i * BLOCK_M * width, mask=in_rows, other=0.0, cache_modifier=".cg")
    if last:
        if GATED:
            gate, up = tl.split(tl.reshape(tl.trans(total), [BLOCK_M, BLOCK_N // 2, 2]))
            place = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            inside = (m < rows)[:, None] & (place < half)[None, :]
            value = (silu(gate) * up).to(out.dtype.element_ty)
            tl.store(out + m[:, None] * half + place[None, :], value, mask=inside)
        else:
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


def tiles(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: Shape,
    counters: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Multiply: x [1 to 64, in] @ weight [out, in].T + bias.

    Args:
        x: rows.
        weight: contiguous.
        bias: [out].
        shape: how to cut it.
        counters: int32 zeros, `counters_for(out)` of them, which no other product uses meanwhile; without them, or
            with fewer, inputs are not shared out.
        gated: whether out is silu(first half) * second half.
    """
    rows, (outputs, inputs) = len(x), weight.shape
    tiles = triton.cdiv(outputs, shape.outputs)
    pieces = triton.cdiv(inputs, shape.inputs)
    shares = min(shape.shares, pieces) if counters is not None and len(counters) >= tiles else 1
    share = triton.cdiv(pieces, shares) * shape.inputs
    shares = triton.cdiv(inputs, share)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    out = torch.empty((rows, outputs // 2 if gated else outputs), dtype=x.dtype, device=x.device)
    parts = out
    if shares > 1:
        parts = torch.empty((shares, block_m, tiles * shape.outputs), dtype=torch.float32, device=x.device)
    _tiles[(tiles, shares)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        parts,
        out if counters is None else counters,
        rows,
        x.stride(0),
        OUT=outputs,
        IN=inputs,
        SHARE=share,
        SHARES=shares,
        BIAS=bias is not None,
        GATED=gated,
        BLOCK_M=block_m,
        BLOCK_N=shape.outputs,
        BLOCK_K=shape.inputs,
        FETCHED=FETCHED,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **launch(x.device),
    )
    return out


def counters_for(outputs: int) -> int:
    """How many counters a weight of so many outputs needs, however it is cut."""
    return -(-outputs // SMALLEST_TILE)
