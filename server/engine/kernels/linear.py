"""Which kernel a linear layer of few rows takes, and how it is cut. Torch's own product takes the others."""

from __future__ import annotations

import torch
from torch import Tensor

from server.engine.kernels.matvec import MOST_ROWS, MOST_VECTOR_ROWS, Shape, tiles, vectors

LARGE = 32768
"""Outputs of a weight that keeps the device busy in any way: heads of large vocabularies."""


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """X [T, in] @ weight [out, in].T + bias, or None where torch's product is quicker or the layout does not suit."""
    rows, (outputs, inputs) = len(x), weight.shape
    if not 0 < rows <= MOST_ROWS or x.dim() != 2 or x.stride(1) != 1 or not weight.is_contiguous():
        return None
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16) or inputs % 8:
        return None
    if rows <= MOST_VECTOR_ROWS:
        return vectors(x, weight, bias, vector_shape(rows, outputs, inputs))
    return tiles(x, weight, bias, tile_shape(rows, outputs, inputs))


def vector_shape(rows: int, outputs: int, inputs: int) -> Shape:
    """For 1 to 4 rows."""
    piece = 2048 if rows == 1 else 1024
    while piece > 256 and piece >= 2 * inputs:
        piece //= 2
    return Shape(outputs=4 if outputs < LARGE else 8, inputs=piece, warps=4)


def tile_shape(rows: int, outputs: int, inputs: int) -> Shape:
    """For up to 64 rows."""
    return Shape(outputs=16 if outputs < LARGE else 32, inputs=256, warps=4, stages=4)
