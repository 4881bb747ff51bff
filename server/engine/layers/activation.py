"""The gated activation of the MLPs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from server.engine.kernels.available import compiles_for


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [T, 2 * I] rows that hold the gate's half first; returns [T, I]."""
    if gate_up.is_cuda and compiles_for(gate_up.device):
        from server.engine.kernels import activation

        return activation.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
