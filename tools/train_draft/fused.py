"""Arithmetic that torch compiles, so that memory is passed over once; TORCH_COMPILE_DISABLE=1 does without."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

P = ParamSpec("P")


def fused(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Compile at the first call: who only imports this does not wait for the compiler."""
    compiled: Callable[P, Tensor] | None = None

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        nonlocal compiled
        if compiled is None:
            plain = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
            compiled = function if plain else torch.compile(function, dynamic=True)
        return compiled(*args, **kwargs)

    return call


@fused
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., size] -> the same in bf16, computed in fp32."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).bfloat16()


@fused
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


@fused
def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean over rows of the cross-entropy of [R, V] logits to [R, V] probabilities."""
    scores = logits.float()
    return (scores.logsumexp(-1) - (scores * wanted.float()).sum(-1)).mean()
