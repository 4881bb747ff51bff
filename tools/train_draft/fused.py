"""Arithmetic that torch compiles, so that memory is passed over once; TORCH_COMPILE_DISABLE=1 does without."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.compile(dynamic=True)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., size] -> the same in bf16, computed in fp32."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).bfloat16()


@torch.compile(dynamic=True)
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


@torch.compile(dynamic=True)
def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean over rows of the cross-entropy of [R, V] logits to [R, V] probabilities."""
    scores = logits.float()
    return (scores.logsumexp(-1) - (scores * wanted.float()).sum(-1)).mean()
