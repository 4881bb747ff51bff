"""Which kernel a linear layer of few rows takes, and how it is cut. Torch's own product takes the others.

The tables come from `benchmarks/kernels.py --sweep` on an H200, over the shapes of Qwen3-8B and Qwen3-30B-A3B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.engine.kernels.matvec import MOST_ROWS, MOST_VECTOR_ROWS, Shape, counters_for, tiles, vectors

MULTIPROCESSORS = 132
"""Of an H100 or H200."""
SMALL = 16 << 20
"""Numbers of a weight that is read before tensor cores are fed."""


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor | None, *, gated: bool = False
) -> Tensor | None:
    """X [T, in] @ weight [out, in].T + bias, or None where torch's product is quicker or the layout does not suit.

    Args:
        x: rows.
        weight: as torch's.
        bias: [out]; not together with `gated`.
        counters: of this weight alone, see `tiles`.
        gated: whether to return silu(first half) * second half of it.
    """
    rows, (outputs, inputs) = len(x), weight.shape
    if not 0 < rows <= MOST_ROWS or x.dim() != 2 or x.stride(1) != 1 or not weight.is_contiguous():
        return None
    if rows > most_rows(outputs, inputs):
        return None
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16) or inputs % 8:
        return None
    if rows <= most_vector_rows(outputs, inputs):
        return vectors(x, weight, bias, vector_shape(rows, outputs, inputs), gated=gated)
    return tiles(x, weight, bias, tile_shape(rows, outputs, inputs), counters, gated=gated)


def make_counters(outputs: int, device: torch.device) -> Tensor:
    """Of one weight."""
    return torch.zeros(counters_for(outputs), dtype=torch.int32, device=device)


def most_rows(outputs: int, inputs: int) -> int:
    """Up to how many rows torch's product is no quicker; it starts later, since it is not chained."""
    if outputs <= inputs:
        return MOST_ROWS
    return 32 if outputs * inputs > SMALL else 16


def most_vector_rows(outputs: int, inputs: int) -> int:
    """Up to how many rows tensor cores do not pay."""
    size = outputs * inputs
    return 1 if size > SMALL else 2 if size > SMALL // 16 else MOST_VECTOR_ROWS


def vector_shape(rows: int, outputs: int, inputs: int) -> Shape:
    """For 1 to 4 rows."""
    if rows > 1:
        return Shape(outputs=2, inputs=1024, warps=4)
    if inputs > 8192:
        return Shape(outputs=2, inputs=2048, warps=4)
    # At least two pieces, so that one is on its way while the other is used.
    return Shape(outputs=4, inputs=2048, warps=8) if inputs >= 4096 else Shape(outputs=4, inputs=1024, warps=4)


def tile_shape(rows: int, outputs: int, inputs: int) -> Shape:
    """For up to 64 rows: one tile, or share of one, for each multiprocessor."""
    tiles = -(-outputs // 64)
    if MULTIPROCESSORS // 2 < tiles < MULTIPROCESSORS and rows <= 16:
        # Half of the tile, since half of the device would idle in a second round.
        return Shape(outputs=32, inputs=256, warps=4, stages=4, shares=2 if inputs < 4096 else 1)
    shares = min(8, max(1, MULTIPROCESSORS // tiles))
    if shares > 1 and rows <= 16 and inputs >= 4096:
        return Shape(outputs=64, inputs=256, warps=4, stages=4, shares=shares)
    return Shape(outputs=64, inputs=128, warps=4, stages=5, shares=shares)
