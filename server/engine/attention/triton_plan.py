"""How the Triton backend cuts a step into launches. No triton here: shapes and tables alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from server.engine.attention.base import AttentionNeed, StepMetadata, UniformStep

MAX_PARTS = 32
PROGRAMS = 264
"""Two for each multiprocessor of an H100 or H200."""


@dataclass(frozen=True)
class TileShapes:
    """Sizes of the kernels' blocks."""

    prompt: int
    """(query, query head) pairs in a tile of a long row."""
    short: int
    """Most of them in a row that one tile holds; its keys can be split."""
    keys: int
    """Keys a block."""
    warps: int = 4
    stages: int = 2
    """How far the next block of keys is ahead."""


@dataclass(frozen=True)
class Tiles:
    """Long rows, cut into tiles of queries; one launch."""

    table: Tensor
    """int32 [N, TILE_FIELDS]."""
    end: int
    """Keys of the longest tile."""


@dataclass(frozen=True)
class Rows:
    """Short rows whose tiles have the same size; two launches, or one where keys are not split."""

    lengths: Tensor
    """int32 [N], tokens of each row; 0 for padding."""
    table: Tensor | None
    """int32 [N, ROW_FIELDS]; None when all rows are uniform."""
    query_len: int
    """New tokens of a uniform row; 0 when the table says."""
    most_queries: int
    """New tokens of the row that has most."""
    block_m: int
    parts: int
    longest: int
    """Keys of the longest row."""


@dataclass(frozen=True)
class TritonPlan:
    """One step."""

    slots: Tensor
    block_tables: Tensor
    tiles: Tiles | None
    rows: list[Rows]


def tile_shapes(need: AttentionNeed) -> TileShapes:
    """Sizes that keep a block of keys, its values and the queries within the shared memory of sm_80 and later."""
    group = need.num_heads // need.num_kv_heads
    least = max(16, power_of_two(group))
    head_bytes = power_of_two(need.head_dim) * need.dtype.itemsize
    keys = 64 if head_bytes <= 256 else 32 if head_bytes <= 512 else 16
    # fp32 products run without tensor cores (TF32 is not exact): larger tiles would only spill registers.
    if need.dtype == torch.float32:
        return TileShapes(least, max(32, least), keys)
    return TileShapes(max(64, least), max(64, least), keys)


def num_parts(rows: int, kv_heads: int, longest: int, shapes: TileShapes) -> int:
    """Into how many parts keys are split, so that few rows keep the device busy.

    For two programs a multiprocessor of an H200; four where most are there already: a part more costs the least there.
    """
    programs = rows * kv_heads
    if programs >= PROGRAMS:
        return 1
    wanted = PROGRAMS if programs < 96 else 2 * PROGRAMS
    return max(1, min(-(-wanted // programs), -(-longest // shapes.keys), MAX_PARTS))


def plan_rows(step: StepMetadata, need: AttentionNeed, shapes: TileShapes, *, split: bool) -> TritonPlan:
    """Rows that one tile holds by the size of that tile, all others cut into tiles.

    Args:
        step: the step.
        need: the heads.
        shapes: of tiles.
        split: whether there is a cache; without one, all rows are cut into tiles, which read the step's own tokens.
    """
    group, device = need.num_heads // need.num_kv_heads, step.block_tables.device
    starts = step.query_start
    tiles: list[tuple[int, int, int, int]] = []
    short: dict[int, list[tuple[int, int, int, int]]] = {}
    per_tile = shapes.prompt // group
    for row, length in enumerate(step.seq_lens):
        start, new = starts[row], starts[row + 1] - starts[row]
        if split and new * group <= shapes.short:
            short.setdefault(_block_m(new, group), []).append((row, start, new, length))
        else:
            context = length - new
            tiles += [(row, start + i, min(per_tile, new - i), context + i) for i in range(0, new, per_tile)]
    rows = []
    for block_m, own in short.items():
        table = torch.from_numpy(np.array(own, np.int32)).to(device)
        longest = max(length for _, _, _, length in own)
        rows.append(
            Rows(
                lengths=table[:, 3].contiguous(),
                table=table[:, :3].contiguous(),
                query_len=0,
                most_queries=max(new for _, _, new, _ in own),
                block_m=block_m,
                parts=num_parts(len(own), need.num_kv_heads, longest, shapes),
                longest=longest,
            )
        )
    cut = None
    if tiles:
        table = torch.from_numpy(np.array(tiles, np.int32)).to(device)
        cut = Tiles(table, max(count + position for _, _, count, position in tiles))
    return TritonPlan(step.slot_mapping, step.block_tables, cut, rows)


def plan_uniform(step: UniformStep, need: AttentionNeed, shapes: TileShapes) -> TritonPlan:
    """One launch for all rows; nothing is read from the device."""
    rows = Rows(
        lengths=step.seq_lens,
        table=None,
        query_len=step.query_len,
        most_queries=step.query_len,
        block_m=_block_m(step.query_len, need.num_heads // need.num_kv_heads),
        parts=num_parts(len(step.seq_lens), need.num_kv_heads, step.longest, shapes),
        longest=step.longest,
    )
    return TritonPlan(step.slot_mapping, step.block_tables, None, [rows])


def longest_part(rows: Rows, keys_a_block: int) -> int:
    """Keys of the longest part, in whole blocks."""
    of_a_part = -(-rows.longest // rows.parts)
    return -(-of_a_part // keys_a_block) * keys_a_block


def _block_m(queries: int, group: int) -> int:
    return max(16, power_of_two(queries * group))  # tl.dot takes no less than 16


def power_of_two(size: int) -> int:
    """The smallest that is not below `size`."""
    return 1 << (size - 1).bit_length()
