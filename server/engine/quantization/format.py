"""What a weight format is: the tensors that stand for one weight in a checkpoint, and their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

Family = Literal["none", "fp8", "int4", "nvfp4", "ggml"]


class TensorSpec(NamedTuple):
    """One stored tensor as the layers hold it."""

    shape: tuple[int, ...]
    """Also its shape in the file."""
    dtype: torch.dtype
    """In memory. Codes are as in the file; scales become float32, which holds all their formats."""
    expected: tuple[int, ...] | None = None
    """The only values that it may hold, where they follow from the weight's shape."""
    divisor: bool = False
    """Whether the formula divides by it."""


@dataclass(frozen=True)
class Unquantized:
    """One tensor, `weight`, of floating-point numbers that a checkpoint of the model's dtype would hold, too."""

    family: Literal["none"] = field(default="none", init=False)
    label: Literal["none"] = field(default="none", init=False)


UNQUANTIZED = Unquantized()


class QuantizedFormat(Protocol):
    """A frozen description; two weights are stored alike when their formats are equal."""

    @property
    def family(self) -> Family:
        """What kernels are made for."""

    @property
    def label(self) -> str:
        """The family and how fine its scales are, such as "int4_g128"; what users see."""

    def tensors(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """The tensors of a weight of this logical shape, by the last part of their names."""

    def dequantize(self, parts: Mapping[str, Tensor], columns: int) -> Tensor:
        """The weight, or a stack of weights.

        Args:
            parts: `tensors(rows, columns)`, all with the same further dimensions in front.
            columns: the logical ones; packed ones may be padded.

        Returns:
            float32 [..., rows, columns].
        """


WeightFormat: TypeAlias = Unquantized | QuantizedFormat
