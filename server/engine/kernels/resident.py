"""The state of decoding sequences, as in `server.engine.resident`: one kernel in place of many small operations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.engine.kernels.runtime import INTERPRETED, power_of_two
from server.engine.kv.groups import Pages
from server.engine.resident import ResidentState, StepInputs, Verdict

_TABLE = 256
"""Entries of a table that are copied at once."""


@triton.jit
def _gather(
    at: tl.tensor,
    lengths: tl.tensor,
    tokens: tl.tensor,
    blocks: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    seq_lens: tl.tensor,
    tables: tl.tensor,
    idle: tl.tensor,
    width: tl.tensor,
    COUNT: tl.constexpr,
    COUNT_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    TABLE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """One program a row. WHOLE: copy the whole table, for an interpreter that takes no loop bound from memory."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(at + row)
    real = place != idle
    first = tl.load(lengths + place)
    own = blocks + place * width
    step = tl.arange(0, COUNT_PADDED)
    inside = step < COUNT
    position = first + step
    block = tl.load(own + position // BLOCK_SIZE, mask=inside, other=0)
    slot = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    out = row * COUNT + step
    tl.store(ids + out, tl.load(tokens + place * COUNT + step, mask=inside, other=0), mask=inside)
    tl.store(positions + out, position, mask=inside)
    tl.store(slots + out, slot, mask=inside)
    tl.store(seq_lens + row, tl.where(real, first + COUNT, 0).to(tl.int32))
    used = width
    if not WHOLE:
        used = (first + COUNT + BLOCK_SIZE - 1) // BLOCK_SIZE
    for start in range(0, used * RATIO, TABLE):
        page = start + tl.arange(0, TABLE)
        there = page < width * RATIO
        holder = tl.load(own + page // RATIO, mask=there, other=0)
        tl.store(tables + row * width * RATIO + page, holder * RATIO + page % RATIO, mask=there)


@triton.jit
def _places(
    first: tl.tensor,
    blocks: tl.tensor,
    real: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    width: tl.tensor,
    COUNT: tl.constexpr,
    COUNT_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, COUNT_PADDED)
    inside = step < COUNT
    position = tl.load(first + row) + step
    block = tl.load(blocks + row * width + position // BLOCK_SIZE, mask=inside, other=0)
    slot = tl.where(tl.load(real + row) != 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(positions + row * COUNT + step, position, mask=inside)
    tl.store(slots + row * COUNT + step, slot, mask=inside)


@triton.jit
def _verify(
    at: tl.tensor,
    lengths: tl.tensor,
    tokens: tl.tensor,
    sampled: tl.tensor,
    limits: tl.tensor,
    by_lot: tl.tensor,
    first: tl.tensor,
    inputs: tl.tensor,
    emitted: tl.tensor,
    accepted: tl.tensor,
    real: tl.tensor,
    idle: tl.tensor,
    COUNT: tl.constexpr,
    COUNT_PADDED: tl.constexpr,
) -> None:
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(at + row)
    step = tl.arange(0, COUNT_PADDED)
    inside = step < COUNT
    chosen = tl.load(sampled + row * COUNT + step, mask=inside, other=0)
    draft = tl.load(tokens + place * COUNT + step + 1, mask=step < COUNT - 1, other=0)
    right = (draft == chosen) & (step < tl.load(limits + row)) & (step < COUNT - 1)
    # The first draft that is not right ends the run; behind the last one, none is.
    count = tl.min(tl.where(right, COUNT, step), axis=0).to(tl.int64)
    lot = tl.load(by_lot + row)
    count = tl.where(lot < 0, count, lot)
    out = row * COUNT + step
    tl.store(inputs + out, tl.load(tokens + place * COUNT + step, mask=inside, other=0), mask=inside)
    tl.store(emitted + out, tl.where(step < count, draft, chosen), mask=inside)
    tl.store(accepted + row, count)
    tl.store(first + row, tl.load(lengths + place))
    tl.store(real + row, place != idle)


@triton.jit
def _keep(
    at: tl.tensor,
    lengths: tl.tensor,
    tokens: tl.tensor,
    first: tl.tensor,
    emitted: tl.tensor,
    accepted: tl.tensor,
    drafts: tl.tensor,
    best: tl.tensor,
    results: tl.tensor,
    idle: tl.tensor,
    COUNT: tl.constexpr,
    COUNT_PADDED: tl.constexpr,
) -> None:
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(at + row)
    step = tl.arange(0, COUNT_PADDED)
    inside = step < COUNT
    later = step < COUNT - 1
    count = tl.load(accepted + row)
    made = tl.load(emitted + row * COUNT + step, mask=inside, other=0)
    draft = tl.load(drafts + row * (COUNT - 1) + step, mask=later, other=0)
    number = tl.load(best + row * COUNT + step, mask=inside, other=0.0).to(tl.float32)
    broken = tl.max(((number != number) | (tl.abs(number) == float("inf"))).to(tl.int32), axis=0)
    tl.store(lengths + place, tl.where(place != idle, tl.load(first + row) + count + 1, 0))
    tl.store(tokens + place * COUNT, tl.load(emitted + row * COUNT + count))
    tl.store(tokens + place * COUNT + 1 + step, draft, mask=later)
    own = results + row * 2 * COUNT
    tl.store(own + step, made, mask=inside)
    tl.store(own + COUNT, tl.where(broken != 0, -1, count))
    tl.store(own + COUNT + 1 + step, draft, mask=later)


def gather_inputs(state: ResidentState, at: Tensor, inputs: StepInputs, pages: Pages) -> None:
    """See `server.engine.resident.gather_inputs`."""
    count, width = state.tokens.shape[1], state.blocks.shape[1]
    _gather[(len(at),)](
        at,
        state.lengths,
        state.tokens,
        state.blocks,
        inputs.ids,
        inputs.positions,
        inputs.slots,
        inputs.lengths,
        inputs.tables,
        len(state.lengths) - 1,
        width,
        COUNT=count,
        COUNT_PADDED=power_of_two(count),
        BLOCK_SIZE=pages.block_size,
        RATIO=pages.per_block,
        TABLE=_TABLE,
        WHOLE=INTERPRETED,
        num_warps=1,
    )


def token_places(first: Tensor, count: int, blocks: Tensor, real: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """See `server.engine.resident.token_places`."""
    positions = torch.empty(len(first) * count, dtype=torch.int64, device=first.device)
    slots = torch.empty_like(positions)
    _places[(len(first),)](
        first,
        blocks,
        real,
        positions,
        slots,
        blocks.shape[1],
        COUNT=count,
        COUNT_PADDED=power_of_two(count),
        BLOCK_SIZE=block_size,
        num_warps=1,
    )
    return positions, slots


def verify(state: ResidentState, at: Tensor, sampled: Tensor, limits: Tensor, by_lot: Tensor) -> Verdict:
    """See `server.engine.resident.verify`."""
    rows, count = sampled.shape
    first, accepted = torch.empty_like(at), torch.empty_like(at)
    inputs, emitted = torch.empty_like(sampled), torch.empty_like(sampled)
    real = torch.empty(rows, dtype=torch.bool, device=at.device)
    _verify[(rows,)](
        at,
        state.lengths,
        state.tokens,
        sampled,
        limits,
        by_lot,
        first,
        inputs,
        emitted,
        accepted,
        real,
        len(state.lengths) - 1,
        COUNT=count,
        COUNT_PADDED=power_of_two(count),
        num_warps=1,
    )
    return Verdict(first, inputs, emitted, accepted, real)


def keep(state: ResidentState, at: Tensor, verdict: Verdict, drafts: Tensor, best: Tensor, results: Tensor) -> None:
    """See `server.engine.resident.keep`."""
    rows, count = verdict.emitted.shape
    _keep[(rows,)](
        at,
        state.lengths,
        state.tokens,
        verdict.first,
        verdict.emitted,
        verdict.accepted,
        drafts.contiguous(),
        best,
        results,
        len(state.lengths) - 1,
        COUNT=count,
        COUNT_PADDED=power_of_two(count),
        num_warps=1,
    )
