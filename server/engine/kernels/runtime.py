"""What all Triton kernels need to know of the process and the device."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: bool = not isinstance(tl.sum, triton.JITFunction)
"""Whether triton runs kernels in its interpreter, decided when triton was imported."""


@cache
def chained(device: torch.device) -> bool:
    """Whether kernels may start before the one in front of them has ended (programmatic dependent launch, sm_90).

    A kernel launched so sets itself up, and reads what no kernel writes (weights), while the last one drains. It must
    run `begin` before it touches anything else, and pass `launch(device)` at its launch.
    """
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch(device: torch.device) -> dict[str, bool]:
    """Keywords of every launch of a kernel that has a parameter CHAINED."""
    return {"CHAINED": True, "launch_pdl": True} if chained(device) else {"CHAINED": False}


@triton.jit
def release(CHAINED: tl.constexpr) -> None:
    """Let the next kernel set itself up; called first, by every program."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def begin(CHAINED: tl.constexpr) -> None:
    """Wait until all that earlier kernels wrote can be read, and all that they read may be overwritten."""
    if CHAINED:
        gdc_wait()


@triton.jit
def fetch(lines: tl.tensor, CHAINED: tl.constexpr) -> None:
    """Bring the cache lines at some addresses into the L2 cache; before `begin`, while earlier kernels still run.

    It reads nothing, so it may name memory that these kernels write.
    """
    if CHAINED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )


def power_of_two(size: int) -> int:
    """The smallest that is not below `size`."""
    return 1 << (size - 1).bit_length()
