"""The state of decoding sequences on the device, and how a step reads and changes it.

The functions are the reference, in torch's operations; `server.engine.kernels.resident` does the same with one kernel
each where kernels are compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from server.engine.kernels.available import compiles_for
from server.engine.kv.groups import Pages


@dataclass(frozen=True)
class ResidentState:
    """What is known of sequences by their place; the last place is that of rows of padding and stays empty."""

    lengths: Tensor
    """int64 [P], tokens in the cache: the position of the next one."""
    tokens: Tensor
    """int64 [P, 1 + k], the newest token, not in the cache yet, and the drafts that follow it."""
    blocks: Tensor
    """int64 [P, W]."""


@dataclass(frozen=True)
class StepInputs:
    """What a forward pass over R rows reads, in memory for as many rows as will ever run."""

    ids: Tensor
    """int64 [R * (1 + k)]."""
    positions: Tensor
    """int64 [R * (1 + k)]."""
    slots: Tensor
    """int64 [R * (1 + k)], -1 for rows of padding."""
    lengths: Tensor
    """int32 [R], tokens in the cache after the step, 0 for rows of padding."""
    tables: Tensor
    """int64 [R, kernel pages of W blocks]."""


@dataclass(frozen=True)
class Verdict:
    """What became of R rows' drafts."""

    first: Tensor
    """int64 [R], position of the first verified token."""
    inputs: Tensor
    """int64 [R, 1 + k], the verified tokens."""
    emitted: Tensor
    """int64 [R, 1 + k], the accepted drafts and the token after them; beyond these, anything."""
    accepted: Tensor
    """int64 [R], 0 to k."""
    real: Tensor
    """bool [R], false for rows of padding."""


def gather_inputs(state: ResidentState, at: Tensor, inputs: StepInputs, pages: Pages) -> None:
    """Lay the next step's tokens out.

    Args:
        state: of all sequences.
        at: int64 [R], the rows' places.
        inputs: written for R rows.
        pages: how the target's blocks are cut.
    """
    if compiles_for(at.device):
        from server.engine.kernels import resident

        return resident.gather_inputs(state, at, inputs, pages)
    rows, width = len(at), state.tokens.shape[1]
    first, real, blocks = state.lengths[at], at != len(state.lengths) - 1, state.blocks[at]
    positions, slots = token_places(first, width, blocks, real, pages.block_size)
    inputs.ids[: rows * width] = state.tokens[at].flatten()
    inputs.positions[: rows * width] = positions
    inputs.slots[: rows * width] = slots
    inputs.lengths[:rows] = (first + width).masked_fill(~real, 0)
    inputs.tables[:rows] = page_tables(blocks, pages)
    return None


def token_places(first: Tensor, count: int, blocks: Tensor, real: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Positions and slots, both int64 [R * count], of `count` tokens a row.

    Args:
        first: int64 [R], the first one's position.
        count: tokens a row.
        blocks: int64 [R, W], wide enough for every position.
        real: bool [R]; false for rows of padding, whose slots are -1.
        block_size: tokens a block.
    """
    if compiles_for(first.device):
        from server.engine.kernels import resident

        return resident.token_places(first, count, blocks, real, block_size)
    positions = first[:, None] + torch.arange(count, device=first.device)
    slots = blocks.gather(1, positions // block_size) * block_size + positions % block_size
    return positions.flatten(), slots.masked_fill_(~real[:, None], -1).flatten()


def page_tables(blocks: Tensor, pages: Pages) -> Tensor:
    """Blocks [R, W] -> their kernel pages [R, W * pages a block], which follow each other."""
    ratio = pages.per_block
    if ratio == 1:
        return blocks
    return (blocks[:, :, None] * ratio + torch.arange(ratio, device=blocks.device)).flatten(1)


def verify(state: ResidentState, at: Tensor, sampled: Tensor, limits: Tensor, by_lot: Tensor) -> Verdict:
    """Compare the drafts with what the target chose.

    Args:
        state: of all sequences; not changed.
        at: int64 [R], the rows' places.
        sampled: int64 [R, 1 + k], the target's choice after each of the row's tokens.
        limits: int64 [R], drafts that a row may use.
        by_lot: int64 [R], drafts that are accepted whatever they are, at most k; -1 where the comparison decides.
    """
    if compiles_for(at.device):
        from server.engine.kernels import resident

        return resident.verify(state, at, sampled, limits, by_lot)
    inputs, step = state.tokens[at], torch.arange(state.tokens.shape[1], device=at.device)
    right = (inputs[:, 1:] == sampled[:, :-1]) & (step[:-1] < limits[:, None])
    accepted = torch.where(by_lot < 0, right.long().cumprod(1).sum(1), by_lot)
    # Accepted drafts are what the target chose, unless they were accepted by lot.
    emitted = torch.where(step < accepted[:, None], inputs.roll(-1, 1), sampled)
    return Verdict(state.lengths[at], inputs, emitted, accepted, at != len(state.lengths) - 1)


def keep(state: ResidentState, at: Tensor, verdict: Verdict, drafts: Tensor, best: Tensor, results: Tensor) -> None:
    """Bring the state to where the next step begins, and write down what the host is to know.

    Args:
        state: changed for the rows' places.
        at: int64 [R], the rows' places.
        verdict: on the rows.
        drafts: int64 [R, k], the next ones.
        best: [R, 1 + k], a number of each token that is finite unless the model's were not.
        results: int64 [R, 2 + 2 * k], written: emitted tokens, accepted drafts (-1: numbers that are not finite), the
            next drafts.
    """
    if compiles_for(at.device):
        from server.engine.kernels import resident

        return resident.keep(state, at, verdict, drafts, best, results)
    after = verdict.first + verdict.accepted + 1
    newest = verdict.emitted.gather(1, verdict.accepted[:, None])
    # Rows of padding share a place, which stays as it is.
    state.lengths.index_copy_(0, at, after.masked_fill_(~verdict.real, 0))
    state.tokens.index_copy_(0, at, torch.cat((newest, drafts), 1))
    accepted = verdict.accepted.masked_fill(~best.isfinite().all(1), -1)
    results.copy_(torch.cat((verdict.emitted, accepted[:, None], drafts), 1))
    return None
