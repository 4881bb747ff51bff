"""Experts of many tokens: pairs are sorted by expert, and each expert's pairs share one pass over its weights."""

from __future__ import annotations

import triton
import triton.language as tl

from server.engine.kernels.activation import silu
from server.engine.kernels.four_bits import unpack
from server.engine.kernels.runtime import begin, release


@triton.jit(do_not_specialize=["num_pairs"])
def sort_pairs(
    ids: tl.tensor,
    sorted_pairs: tl.tensor,
    starts: tl.tensor,
    num_pairs: tl.tensor,
    LOOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Sort pairs by expert, in order within one; one program an expert, which counts those in front of its own.

    `starts` is int32 [E + 1]. LOOPS is for the interpreter, which takes no loop bound from memory: 0 when compiled.
    """
    release(CHAINED)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    begin(CHAINED)
    before = tl.zeros([BLOCK], tl.int32)
    for at in range(0, LOOPS * BLOCK if LOOPS else num_pairs, BLOCK):
        got = tl.load(ids + at + lane, mask=at + lane < num_pairs, other=1 << 30)
        before += (got < expert).to(tl.int32)
    start = tl.sum(before, axis=0)
    tl.store(starts + expert, start)
    place = start
    for at in range(0, LOOPS * BLOCK if LOOPS else num_pairs, BLOCK):
        got = tl.load(ids + at + lane, mask=at + lane < num_pairs, other=1 << 30)
        own = (got == expert).to(tl.int32)
        rank = tl.cumsum(own, axis=0) - 1
        tl.store(sorted_pairs + place + rank, at + lane, mask=own == 1)
        place += tl.sum(own, axis=0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, place)


@triton.jit
def product(
    rows_at: tl.tensor,
    in_rows: tl.tensor,
    codes: tl.tensor,
    fine: tl.tensor,
    shifts: tl.tensor,
    n: tl.tensor,
    block_row: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> tl.tensor:
    """Rows at `rows_at` [BLOCK_M] times the rows n [BLOCK_N] of one expert's weight: fp32 [BLOCK_M, BLOCK_N].

    Without the coarse scale. `codes`, `fine` and `shifts` are one expert's; `block_row` [BLOCK_N] are the rows of
    blocks that n lie in.
    """
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    inside = n < OUT
    if (KIND == "int4") | (KIND == "fp4"):
        RUNS: tl.constexpr = BLOCK_K // 32
        byte = tl.arange(0, BLOCK_K // 2)
        low_column = (byte // 16) * 32 + byte % 16
        run = tl.arange(0, RUNS)
        for k in range(0, IN, BLOCK_K):
            in_byte = k // 2 + byte < IN // 2
            at = codes + n[:, None] * (IN // 2) + (k // 2 + byte)[None, :]
            pair = tl.load(at, mask=inside[:, None] & in_byte[None, :], other=0)
            low, high = unpack(pair, KIND == "fp4", COMPUTE)
            scale_at = n[:, None] * (IN // GROUP) + ((k + run * 32) // GROUP)[None, :]
            in_run = inside[:, None] & (k + run * 32 < IN)[None, :]
            # One rounding, as of the product in fp32: codes and scales have few digits.
            low_scale = tl.load(fine + scale_at, mask=in_run, other=0.0).to(low.dtype)
            high_scale = low_scale
            if GROUP == 16:
                high_scale = tl.load(fine + scale_at + 1, mask=in_run, other=0.0).to(low.dtype)
            low = tl.reshape(low, [BLOCK_N, RUNS, 16]) * low_scale[:, :, None]
            high = tl.reshape(high, [BLOCK_N, RUNS, 16]) * high_scale[:, :, None]
            if SHIFTED:
                shift = tl.load(shifts + scale_at, mask=in_run, other=0.0).to(low.dtype)[:, :, None]
                low, high = low - shift, high - shift
            low = tl.reshape(low, [BLOCK_N, BLOCK_K // 2]).to(COMPUTE)
            high = tl.reshape(high, [BLOCK_N, BLOCK_K // 2]).to(COMPUTE)
            mask = in_rows[:, None] & in_byte[None, :]
            x_low = tl.load(rows_at[:, None] + (k + low_column)[None, :], mask=mask, other=0.0).to(COMPUTE)
            x_high = tl.load(rows_at[:, None] + (k + low_column + 16)[None, :], mask=mask, other=0.0).to(COMPUTE)
            total = tl.dot(x_low, tl.trans(low), total, input_precision="ieee")
            total = tl.dot(x_high, tl.trans(high), total, input_precision="ieee")
    else:
        column = tl.arange(0, BLOCK_K)
        for k in range(0, IN, BLOCK_K):
            in_column = k + column < IN
            x_at = rows_at[:, None] + (k + column)[None, :]
            x = tl.load(x_at, mask=in_rows[:, None] & in_column[None, :], other=0.0).to(COMPUTE)
            at = codes + n[None, :] * IN + (k + column)[:, None]
            numbers = tl.load(at, mask=inside[None, :] & in_column[:, None], other=0.0).to(COMPUTE)
            if KIND == "fp8_block":
                # BLOCK_K divides GROUP: the whole piece has one scale a row.
                ACROSS: tl.constexpr = (IN + GROUP - 1) // GROUP
                scale = tl.load(fine + block_row * ACROSS + k // GROUP, mask=inside, other=0.0)
                total += tl.dot(x, numbers, input_precision="ieee") * scale[None, :]
            else:
                total = tl.dot(x, numbers, total, input_precision="ieee")
    return total


@triton.jit
def gate_up_grouped(
    x: tl.tensor,
    codes: tl.tensor,
    fine: tl.tensor,
    shifts: tl.tensor,
    coarse: tl.tensor,
    sorted_pairs: tl.tensor,
    starts: tl.tensor,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COMPUTE: tl.constexpr,
    LOOPS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """silu(gate) * up, out [pairs, OUT / 2] in the order of `sorted_pairs`.

    One program a (BLOCK_N / 2 outputs, expert, share of its tiles of BLOCK_M pairs).
    """
    release(CHAINED)
    expert = tl.program_id(1).to(tl.int64)
    half: tl.constexpr = OUT // 2
    # Gates and ups alternate, so that they meet in one thread.
    r = tl.arange(0, BLOCK_N)
    within = tl.program_id(0) * (BLOCK_N // 2) + r // 2
    n = tl.where(within < half, within + (r % 2) * half, OUT)
    block_row = within // BLOCK_ROWS + (r % 2) * HALF_BLOCKS if BLOCK_ROWS else r
    BYTES: tl.constexpr = OUT * IN // 2 if (KIND == "int4") | (KIND == "fp4") else OUT * IN
    ACROSS: tl.constexpr = (IN + GROUP - 1) // GROUP if GROUP else 0
    FINE: tl.constexpr = 2 * HALF_BLOCKS * ACROSS if KIND == "fp8_block" else OUT * ACROSS
    codes += expert * BYTES
    fine += expert * FINE
    shifts += expert * FINE
    begin(CHAINED)
    start = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    step = BLOCK_M * tl.num_programs(2)
    offset = tl.program_id(2) * BLOCK_M
    for at in range(0, LOOPS * step if LOOPS else end - start - offset, step):
        place = start + offset + at + tl.arange(0, BLOCK_M)
        in_rows = place < end
        token = tl.load(sorted_pairs + place, mask=in_rows, other=0) // TOP_K
        rows_at = x + token.to(tl.int64) * x_stride
        total = product(
            rows_at, in_rows, codes, fine, shifts, n, block_row,
            IN, OUT, KIND, GROUP, SHIFTED, BLOCK_M, BLOCK_N, BLOCK_K, COMPUTE,
        )  # fmt: skip
        if COARSE:
            scale_at = n if COARSE == OUT else r % 2
            total *= tl.load(coarse + expert * COARSE + scale_at, mask=n < OUT, other=0.0)[None, :]
        gate, up = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N // 2, 2]))
        result = (silu(gate) * up).to(out.dtype.element_ty)
        column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out_at = out + place.to(tl.int64)[:, None] * half + column[None, :]
        tl.store(out_at, result, mask=in_rows[:, None] & (column < half)[None, :])


@triton.jit
def down_grouped(
    hidden: tl.tensor,
    codes: tl.tensor,
    fine: tl.tensor,
    shifts: tl.tensor,
    coarse: tl.tensor,
    sorted_pairs: tl.tensor,
    starts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HALF_BLOCKS: tl.constexpr,
    SHIFTED: tl.constexpr,
    COARSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COMPUTE: tl.constexpr,
    LOOPS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Each pair's output times its weight: out [pairs, OUT] in the order of pairs, from hidden in sorted order."""
    release(CHAINED)
    expert = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block_row = n // BLOCK_ROWS if BLOCK_ROWS else n
    BYTES: tl.constexpr = OUT * IN // 2 if (KIND == "int4") | (KIND == "fp4") else OUT * IN
    ACROSS: tl.constexpr = (IN + GROUP - 1) // GROUP if GROUP else 0
    FINE: tl.constexpr = HALF_BLOCKS * ACROSS if KIND == "fp8_block" else OUT * ACROSS
    codes += expert * BYTES
    fine += expert * FINE
    shifts += expert * FINE
    begin(CHAINED)
    start = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    step = BLOCK_M * tl.num_programs(2)
    offset = tl.program_id(2) * BLOCK_M
    for at in range(0, LOOPS * step if LOOPS else end - start - offset, step):
        place = start + offset + at + tl.arange(0, BLOCK_M)
        in_rows = place < end
        pair = tl.load(sorted_pairs + place, mask=in_rows, other=0).to(tl.int64)
        total = product(
            hidden + place.to(tl.int64) * IN, in_rows, codes, fine, shifts, n, block_row,
            IN, OUT, KIND, GROUP, SHIFTED, BLOCK_M, BLOCK_N, BLOCK_K, COMPUTE,
        )  # fmt: skip
        if COARSE == OUT:
            total *= tl.load(coarse + expert * OUT + n, mask=n < OUT, other=0.0)[None, :]
        elif COARSE:
            total *= tl.load(coarse + expert * COARSE)
        total *= tl.load(weights + pair, mask=in_rows, other=0.0).to(tl.float32)[:, None]
        out_at = out + pair[:, None] * OUT + n[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=in_rows[:, None] & (n < OUT)[None, :])


@triton.jit
def add_pairs(
    pairs: tl.tensor,
    out: tl.tensor,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Sum each token's pairs, in order: [T * TOP_K, SIZE] -> [T, SIZE]; one program a (token, COLUMNS)."""
    release(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    begin(CHAINED)
    total = tl.zeros([COLUMNS], tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.load(pairs + (token * TOP_K + j) * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=inside)
