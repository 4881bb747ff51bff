"""Cosines and sines of positions as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.engine.kernels.runtime import power_of_two


@triton.jit
def _angles(
    positions: tl.tensor,
    inv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    scale: tl.tensor,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
) -> None:
    """One program a token; all arithmetic in fp32."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_PADDED)
    inside = pair < HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(inv + pair, mask=inside, other=0.0)
    right = (tl.cos(angle) * scale).to(cos.dtype.element_ty)
    up = tl.sin(angle) * scale
    at = token * 2 * HALF + pair
    tl.store(cos + at, right, mask=inside)
    tl.store(cos + at + HALF, right, mask=inside)
    tl.store(sin + at, (-up).to(sin.dtype.element_ty), mask=inside)
    tl.store(sin + at + HALF, up.to(sin.dtype.element_ty), mask=inside)


def angles(positions: Tensor, inv: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `layers.rope.Rotary` makes of positions.

    Args:
        positions: int64 [T].
        inv: fp32 [D / 2], angle per position of each pair of dimensions.
        scale: a factor on both results.
        dtype: of the results.

    Returns:
        Cosines and sines, [T, 1, D]; the first half of the sines is negative.
    """
    half = len(inv)
    cos = torch.empty((len(positions), 1, 2 * half), dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    if len(positions):
        _angles[(len(positions),)](
            positions, inv, cos, sin, scale, HALF=half, HALF_PADDED=power_of_two(half), num_warps=1
        )
    return cos, sin
