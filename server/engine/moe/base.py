"""What an MoE backend is: it lays out a layer's experts once and computes them each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from server.engine.attention.base import Unsupported
from server.engine.quantization.format import UNQUANTIZED, WeightFormat
from server.engine.quantization.stored import QuantizedTensors

PackedExperts: TypeAlias = Any
"""Whatever the backend's `pack` returned; only the same backend reads it."""


@dataclass(frozen=True)
class MoENeed:
    """What a group of equal MoE layers asks of its backend. The experts are gated MLPs with silu."""

    device: torch.device
    dtype: torch.dtype
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    """This rank's share of an expert's width."""
    weights: WeightFormat = UNQUANTIZED
    """How the experts are stored."""


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's unquantised experts, as loaded."""

    w13: Tensor
    """[E, 2 * I, H], the gate's rows first, then up's."""
    w2: Tensor
    """[E, H, I]."""

    def expert(self, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[2 * I, H] and [H, I] of one expert; their dtype is the given one already."""
        return self.w13[index], self.w2[index]


@dataclass(frozen=True)
class QuantizedExperts:
    """One layer's quantised experts, as loaded; every projection keeps its own scales."""

    gate_up: QuantizedTensors
    """A stack of [E, 2] weights [I, H]: gate, up."""
    down: QuantizedTensors
    """A stack of [E] weights [H, I]."""

    def expert(self, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[2 * I, H] and [H, I] of one expert, dequantised: new memory."""
        return self.gate_up[index].dequantize(dtype).flatten(0, 1), self.down[index].dequantize(dtype)


class MoEBackend(Protocol):
    """Computes routed experts; one instance per layer, no state besides the need."""

    name: ClassVar[str]
    capturable: ClassVar[bool]
    """Whether `forward` can be captured in a CUDA graph: it neither waits for the device nor asks it for sizes."""
    need: MoENeed

    @classmethod
    def supports(cls, need: MoENeed) -> Unsupported | None:
        """None when the backend can serve the need, else the reason."""

    def __init__(self, need: MoENeed) -> None: ...

    def pack(self, experts: ExpertWeights | QuantizedExperts) -> PackedExperts:
        """Bring the weights into the backend's layout, once at load; it may keep the given tensors.

        Raises:
            TypeError: experts that are stored in another way than the need says.
        """

    def forward(self, x: Tensor, packed: PackedExperts, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            x: [T, H].
            packed: what `pack` returned.
            topk_ids: int64 [T, k], distinct in a row.
            topk_weights: [T, k], x's dtype or fp32.

        Returns:
            [T, H] in x's dtype, new memory.
        """
