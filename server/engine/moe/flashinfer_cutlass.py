"""Fused experts by FlashInfer's CUTLASS kernels, where they are there already: compiling them takes an hour."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, ClassVar

import torch
from torch import Tensor

from server.engine.attention.base import Unsupported
from server.engine.moe.base import ExpertWeights, MoENeed, PackedExperts, QuantizedExperts

GENERATORS = {(9, 0): "gen_cutlass_fused_moe_sm90_module", (10, 0): "gen_cutlass_fused_moe_sm100_module"}
"""By compute capability, in `flashinfer.jit.fused_moe`."""
ALIGNMENT = 8
"""Numbers in 16 bytes, which the kernels read at once."""


class FlashInferCutlassMoE:
    """Unquantised experts in half precision."""

    name: ClassVar[str] = "flashinfer_cutlass"
    capturable: ClassVar[bool] = False
    """It allocates a workspace that depends on the number of tokens, and tunes itself."""

    @classmethod
    def supports(cls, need: MoENeed) -> Unsupported | None:
        """Unquantised float16 and bfloat16, on a CUDA device whose kernels are compiled."""
        if need.weights.family != "none":
            return Unsupported(f"experts stored as {need.weights.label} (it takes unquantised ones only)")
        if need.dtype not in (torch.float16, torch.bfloat16):
            return Unsupported(f"dtype {need.dtype} (it takes float16 and bfloat16)")
        for what, size in (("hidden size", need.hidden_size), ("expert width", need.intermediate_size)):
            if size % ALIGNMENT:
                return Unsupported(f"{what} {size} (it must be a multiple of {ALIGNMENT})")
        problem = _kernels_problem(need.device)
        return None if problem is None else Unsupported(problem)

    def __init__(self, need: MoENeed) -> None:
        self.need = need
        self._fused: Any = importlib.import_module("flashinfer.fused_moe").cutlass_fused_moe

    def pack(self, experts: ExpertWeights | QuantizedExperts) -> PackedExperts:
        """The kernels take up's rows first, then the gate's."""
        if isinstance(experts, QuantizedExperts):
            raise TypeError(f"{self.name} cannot compute {experts.down.format.label} experts")
        return ExpertWeights(up_first(experts.w13), experts.w2)

    def forward(self, x: Tensor, packed: ExpertWeights, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `MoEBackend.forward`."""
        out = torch.empty_like(x)
        self._fused(
            x.contiguous(),
            topk_ids.to(torch.int32),
            topk_weights.to(torch.float32),
            packed.w13,
            packed.w2,
            x.dtype,
            quant_scales=[],
            output=out,
            use_fused_finalize=False,  # the fused one adds with atomics: another result each time
        )
        return out


def up_first(w13: Tensor) -> Tensor:
    """[E, 2 * I, H] with the gate's rows first -> the same memory with up's first."""
    half = w13.shape[1] // 2
    for expert in w13:
        expert.copy_(torch.cat((expert[half:], expert[:half])))
    return w13


def _kernels_problem(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "the flashinfer_cutlass backend needs CUDA"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    capability = torch.cuda.get_device_capability(device)
    generator = GENERATORS.get(capability)
    if generator is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in GENERATORS)
        return f"compute capability {capability[0]}.{capability[1]} (it has kernels for {known})"
    module = importlib.import_module("flashinfer.jit.fused_moe")
    if not getattr(module, generator)().is_compiled:
        return "its kernels are not compiled here, which takes an hour; install flashinfer-jit-cache"
    return None
