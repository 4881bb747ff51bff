"""Whether Triton kernels can run for a device in this process. It does not import triton by itself."""

from __future__ import annotations

import os
from functools import cache

import torch

NEEDS_CUDA = "the triton backend needs CUDA, or TRITON_INTERPRET=1 for tests on a CPU"


def triton_problem(device: torch.device) -> str | None:
    """Why triton cannot run kernels for the device here; None when it can."""
    on_cpu = device.type == "cpu"
    if device.type != "cuda" and not (on_cpu and os.environ.get("TRITON_INTERPRET")):
        return NEEDS_CUDA
    try:
        from server.engine.kernels.runtime import INTERPRETED
    except ImportError as error:
        return f"triton does not import here ({error}); install triton 3.6 or later"
    if on_cpu and not INTERPRETED:
        return f"{NEEDS_CUDA}, set before anything imports triton"
    return None


FP8_CAPABILITY = (8, 9)


def fp8_problem(device: torch.device) -> str | None:
    """Why a CUDA device cannot read fp8 in kernels; None when it can."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= FP8_CAPABILITY:
        return None
    return f"fp8 on compute capability {capability[0]}.{capability[1]} (it needs 8.9)"


@cache
def compiles_for(device: torch.device) -> bool:
    """Whether layers on this device should compute with compiled kernels in place of torch's operations."""
    return device.type == "cuda" and triton_problem(device) is None
