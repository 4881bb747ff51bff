"""RMS norm with the residual addition in front of it, as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.engine.kernels.runtime import begin, launch, power_of_two, release


@triton.jit
def _rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    ADD: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program a row; all arithmetic in fp32. ADD: the rounded sum goes into `residual` and is normalised."""
    release(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PADDED)
    inside = column < SIZE
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    begin(CHAINED)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * SIZE + column
        total = (value + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(at, total, mask=inside)
        value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    tl.store(out + row * SIZE + column, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """norm(x + residual) * weight over the last dimension; the sum is written into `residual`.

    Args:
        x: [T, size].
        residual: contiguous [T, size]; None when nothing is added.
        weight: [size].
        eps: added to the mean square.

    Returns:
        [T, size], new memory.
    """
    rows, size = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        _rms_norm[(rows,)](
            x,
            x if residual is None else residual,
            weight,
            out,
            x.stride(0),
            eps,
            SIZE=size,
            SIZE_PADDED=power_of_two(size),
            ADD=residual is not None,
            num_warps=4 if size <= 2048 else 8,
            **launch(x.device),
        )
    return out
