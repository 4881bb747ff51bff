"""Experts of few tokens: each (token, expert) pair is a matrix-vector product, and every weight is read once a pair."""

from __future__ import annotations

import triton
import triton.language as tl

from server.engine.kernels.activation import silu
from server.engine.kernels.four_bits import unpack
from server.engine.kernels.runtime import begin, release


@triton.jit
def _spread(
    scales: tl.tensor, k: tl.tensor, GROUP: tl.constexpr, ACROSS: tl.constexpr, BLOCK_K: tl.constexpr
) -> tl.tensor:
    """The scales of columns k … k + BLOCK_K, GROUP columns each, [BLOCK_K]; 0 beyond the last one."""
    if BLOCK_K % GROUP == 0:
        # Few loads, and copies of what they got.
        group = k // GROUP + tl.arange(0, BLOCK_K // GROUP)
        scale = tl.load(scales + group, mask=group < ACROSS, other=0.0)
        return tl.reshape(tl.broadcast_to(scale[:, None], [BLOCK_K // GROUP, GROUP]), [BLOCK_K])
    else:
        group = (k + tl.arange(0, BLOCK_K)) // GROUP
        return tl.load(scales + group, mask=group < ACROSS, other=0.0)


@triton.jit
def row_sums(
    x: tl.tensor,
    codes: tl.tensor,
    fine: tl.tensor,
    shifts: tl.tensor,
    row: tl.tensor,
    is_second: tl.tensor,
    block_row: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCKS: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """The product of some rows of one expert's weight with x, without the coarse scale, and not yet summed up.

    Returns fp32 [BLOCK_N, lanes]: the sum over the lanes is the product.

    x is [IN]; codes, fine and shifts are one expert's, see `expert_weights.Stack`. row [BLOCK_N]: those that are not
    below OUT give 0. is_second [BLOCK_N]: which of them belong to the second half. block_row: the row of blocks that
    the rows lie in, counted within their half.
    """
    inside = row < OUT
    if (KIND == "int4") | (KIND == "fp4"):
        RUNS: tl.constexpr = BLOCK_K // 32
        total = tl.zeros([BLOCK_N, RUNS], tl.float32)
        byte = tl.arange(0, BLOCK_K // 2)
        run = tl.arange(0, RUNS)
        low_column = (byte // 16) * 32 + byte % 16
        for k in range(0, IN, BLOCK_K):
            in_byte = k // 2 + byte < IN // 2
            at = codes + row[:, None] * (IN // 2) + (k // 2 + byte)[None, :]
            pair = tl.load(at, mask=inside[:, None] & in_byte[None, :], other=0)
            low, high = unpack(pair, KIND == "fp4", x.dtype.element_ty)
            low, high = low.to(tl.float32), high.to(tl.float32)
            x_low = tl.load(x + k + low_column, mask=in_byte, other=0.0).to(tl.float32)
            x_high = tl.load(x + k + low_column + 16, mask=in_byte, other=0.0).to(tl.float32)
            scale_at = row[:, None] * (IN // GROUP) + ((k + run * 32) // GROUP)[None, :]
            in_run = inside[:, None] & (k + run * 32 < IN)[None, :]
            if GROUP == 16:
                part = tl.sum(tl.reshape(low * x_low[None, :], [BLOCK_N, RUNS, 16]), axis=2)
                total += part * tl.load(fine + scale_at, mask=in_run, other=0.0).to(tl.float32)
                part = tl.sum(tl.reshape(high * x_high[None, :], [BLOCK_N, RUNS, 16]), axis=2)
                total += part * tl.load(fine + scale_at + 1, mask=in_run, other=0.0).to(tl.float32)
            else:
                both = low * x_low[None, :] + high * x_high[None, :]
                part = tl.sum(tl.reshape(both, [BLOCK_N, RUNS, 16]), axis=2)
                total += part * tl.load(fine + scale_at, mask=in_run, other=0.0).to(tl.float32)
            if SHIFTED:
                x_sum = tl.sum(tl.reshape(x_low + x_high, [RUNS, 16]), axis=1)
                total -= x_sum[None, :] * tl.load(shifts + scale_at, mask=in_run, other=0.0).to(tl.float32)
        return total
    else:
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for k in range(0, IN, BLOCK_K):
            column = k + tl.arange(0, BLOCK_K)
            in_column = column < IN
            at = codes + row[:, None] * IN + column[None, :]
            numbers = tl.load(at, mask=inside[:, None] & in_column[None, :], other=0.0).to(tl.float32)
            value = tl.load(x + column, mask=in_column, other=0.0).to(tl.float32)
            if KIND == "fp8_block":
                ACROSS: tl.constexpr = (IN + GROUP - 1) // GROUP
                scale_at = fine + block_row * ACROSS
                scaled = (value * _spread(scale_at, k, GROUP, ACROSS, BLOCK_K))[None, :]
                if HALF_BLOCKS:
                    second = value * _spread(scale_at + HALF_BLOCKS * ACROSS, k, GROUP, ACROSS, BLOCK_K)
                    scaled = tl.where(is_second[:, None], second[None, :], scaled)
                sums += numbers * scaled
            else:
                sums += numbers * value[None, :]
        return sums


@triton.jit
def gate_up_pairs(
    x: tl.tensor,
    codes: tl.tensor,
    fine: tl.tensor,
    shifts: tl.tensor,
    coarse: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    TOP_K: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HALF_BLOCKS: tl.constexpr,
    SHIFTED: tl.constexpr,
    COARSE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """silu(gate) * up of each pair: out [pairs, OUT / 2]; one program a (BLOCK_N / 2 of these, pair).

    COARSE: the coarse scales of an expert: 0, 1 a half, or OUT, one a row.
    """
    release(CHAINED)
    pair = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * (BLOCK_N // 2)
    n = tl.arange(0, BLOCK_N)
    # Gates and ups alternate, so that they meet in one thread.
    is_second = n % 2 == 1
    within = first + n // 2
    row = tl.where(within < OUT // 2, within + tl.where(is_second, OUT // 2, 0), OUT)
    block_row = first // BLOCK_ROWS if BLOCK_ROWS else 0
    begin(CHAINED)
    expert = tl.load(ids + pair)
    BYTES: tl.constexpr = OUT * IN // 2 if (KIND == "int4") | (KIND == "fp4") else OUT * IN
    FINE: tl.constexpr = (
        2 * HALF_BLOCKS * ((IN + GROUP - 1) // GROUP) if KIND == "fp8_block" else OUT * (IN // GROUP if GROUP else 0)
    )
    lanes = row_sums(
        x + (pair // TOP_K) * x_stride, codes + expert * BYTES, fine + expert * FINE, shifts + expert * FINE, row,
        is_second, block_row, IN, OUT, KIND, GROUP, HALF_BLOCKS, SHIFTED, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    total = tl.sum(lanes, axis=1)
    if COARSE:
        at = row if COARSE == OUT else tl.where(is_second, 1, 0)
        total *= tl.load(coarse + expert * COARSE + at, mask=row < OUT, other=0.0)
    gate, up = tl.split(tl.reshape(total, [BLOCK_N // 2, 2]))
    place = first + tl.arange(0, BLOCK_N // 2)
    tl.store(out + pair * (OUT // 2) + place, (silu(gate) * up).to(out.dtype.element_ty), mask=place < OUT // 2)


@triton.jit
def down_tokens(
    hidden: tl.tensor,
    codes: tl.tensor,
    fine: tl.tensor,
    shifts: tl.tensor,
    coarse: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    TOP_K: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HALF_BLOCKS: tl.constexpr,
    SHIFTED: tl.constexpr,
    COARSE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """The weighted sum of a token's experts: out [T, OUT] from hidden [T * TOP_K, IN]; one program a (BLOCK_N, token).

    All of a token's experts are in one program: the sum has one order, and needs no atomics.
    """
    release(CHAINED)
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    row = first + tl.arange(0, BLOCK_N)
    block_row = first // BLOCK_ROWS if BLOCK_ROWS else 0
    BYTES: tl.constexpr = OUT * IN // 2 if (KIND == "int4") | (KIND == "fp4") else OUT * IN
    FINE: tl.constexpr = (
        HALF_BLOCKS * ((IN + GROUP - 1) // GROUP) if KIND == "fp8_block" else OUT * (IN // GROUP if GROUP else 0)
    )
    begin(CHAINED)
    LANES: tl.constexpr = BLOCK_K // 32 if (KIND == "int4") | (KIND == "fp4") else BLOCK_K
    lanes = tl.zeros([BLOCK_N, LANES], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = tl.load(ids + pair)
        factor = tl.load(weights + pair).to(tl.float32)
        got = row_sums(
            hidden + pair * IN, codes + expert * BYTES, fine + expert * FINE, shifts + expert * FINE, row, row < 0,
            block_row, IN, OUT, KIND, GROUP, 0, SHIFTED, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if COARSE == OUT:
            got *= tl.load(coarse + expert * OUT + row, mask=row < OUT, other=0.0)[:, None]
        elif COARSE:
            factor *= tl.load(coarse + expert * COARSE)
        # Summed over the experts first: one sum over the lanes for all of them.
        lanes += got * factor
    tl.store(out + token * OUT + row, tl.sum(lanes, axis=1).to(out.dtype.element_ty), mask=row < OUT)
