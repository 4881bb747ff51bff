"""The gated activation as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.engine.kernels.runtime import begin, launch, release

COLUMNS = 1024


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    """Of fp32: x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_mul(
    gate_up: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program a (row, COLUMNS columns)."""
    release(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    begin(CHAINED)
    at = gate_up + row * stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (silu(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [T, 2 * I] rows that hold the gate's half first; returns [T, I]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _silu_mul[(rows, triton.cdiv(size, COLUMNS))](
            gate_up, out, gate_up.stride(0), SIZE=size, COLUMNS=COLUMNS, num_warps=4, **launch(gate_up.device)
        )
    return out
