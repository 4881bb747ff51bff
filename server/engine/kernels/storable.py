"""How a kernel rounds what it stores."""

from __future__ import annotations

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)
"""The largest number of e4m3."""


@triton.jit
def storable(x: tl.tensor, memory: tl.tensor) -> tl.tensor:
    """`x` in the type that a pointer leads to; beyond fp8's range it is the largest number there, not NaN."""
    if memory.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -FP8_MAX), FP8_MAX)
    return x.to(memory.dtype.element_ty)
