"""4-bit codes to numbers, four bytes at a time: conversions of single integers are the slowest way to do it."""

from __future__ import annotations

import triton
import triton.language as tl

from server.engine.kernels.runtime import INTERPRETED

PACKED = tl.constexpr(not INTERPRETED)
"""Whether to unpack by machine instructions; the interpreter has none."""


def _instructions(finish: str) -> str:
    """Split 4 bytes ($4) into their low ($0, $1) and high ($2, $3) halves, two to a register, and finish each."""
    steps = ["and.b32 l, $4, 0x0f0f0f0f;", "shr.b32 h, $4, 4;", "and.b32 h, h, 0x0f0f0f0f;"]
    for at, (half, places) in enumerate([("l", "0x4140"), ("l", "0x4342"), ("h", "0x4140"), ("h", "0x4342")]):
        steps += [f"prmt.b32 t, {half}, 0, {places};", finish.replace("OUT", f"${at}")]
    return "{ .reg .b32 l, h, t, s, c; " + " ".join(steps) + " }"


# Bits of e2m1, placed where a wider format has them, are its number over a power of two, which the product restores.
_FP4 = (
    "and.b32 s, t, 0x00080008; shl.b32 s, s, 12; and.b32 t, t, 0x00070007; shl.b32 t, t, {shift}; or.b32 t, t, s; "
    "mov.b32 c, {power}; mul.rn.{type}x2 OUT, t, c;"
)
# A code in the lowest bits of 128 (bf16) or 1024 (fp16) adds itself to it.
_INT4 = "or.b32 t, t, {base}; mov.b32 c, {less}; sub.rn.{type}x2 OUT, t, c;"

FP4_BF16 = tl.constexpr(_instructions(_FP4.format(shift=6, power="0x7e807e80", type="bf16")))
FP4_FP16 = tl.constexpr(_instructions(_FP4.format(shift=9, power="0x74007400", type="f16")))
INT4_BF16 = tl.constexpr(_instructions(_INT4.format(base="0x43004300", less="0x43084308", type="bf16")))
INT4_FP16 = tl.constexpr(_instructions(_INT4.format(base="0x64006400", less="0x64086408", type="f16")))


@triton.jit
def _fp4(code: tl.tensor) -> tl.tensor:
    """e2m1 codes 0 to 15 as fp32: their bits in a half float's places, times 2^14."""
    code = code.to(tl.uint16)
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def unpack(pair: tl.tensor, FP4: tl.constexpr, HALF: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Bytes of two codes -> the low ones' and the high ones' numbers, exactly: e2m1, or code - 8.

    They are in HALF where machine instructions unpack them (bf16, fp16), else in fp32.
    """
    if PACKED & (HALF == tl.bfloat16):
        low, high = tl.inline_asm_elementwise(
            FP4_BF16 if FP4 else INT4_BF16,
            "=r,=r,=r,=r,r",
            [pair],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif PACKED & (HALF == tl.float16):
        low, high = tl.inline_asm_elementwise(
            FP4_FP16 if FP4 else INT4_FP16,
            "=r,=r,=r,=r,r",
            [pair],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = pair & 15, pair >> 4
        if FP4:
            low, high = _fp4(low), _fp4(high)
        else:
            low, high = low.to(tl.float32) - 8.0, high.to(tl.float32) - 8.0
    return low, high
