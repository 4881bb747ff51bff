"""Quantised weights in memory: the tensors of one weight, or of a stack of equal ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from server.engine.quantization.format import QuantizedFormat
from server.errors import UserError


@dataclass(frozen=True)
class QuantizedTensors:
    """The tensors that a format names, each with the dimensions of the stack in front."""

    format: QuantizedFormat
    rows: int
    columns: int
    parts: Mapping[str, Tensor]

    @classmethod
    def allocate(
        cls, format: QuantizedFormat, rows: int, columns: int, device: torch.device, stack: tuple[int, ...] = ()
    ) -> QuantizedTensors:
        """Make the memory. Only what follows from the shape is filled in."""
        parts = {}
        for name, spec in format.tensors(rows, columns).items():
            parts[name] = torch.empty(stack + spec.shape, dtype=spec.dtype, device=device)
            if spec.expected is not None:
                parts[name].copy_(torch.tensor(spec.expected))
        return cls(format, rows, columns, parts)

    def __getitem__(self, index: int | tuple[int, ...]) -> QuantizedTensors:
        """A part of the stack, as views."""
        parts = {name: part[index] for name, part in self.parts.items()}
        return QuantizedTensors(self.format, self.rows, self.columns, parts)

    @property
    def num_weights(self) -> int:
        """Numbers in the whole stack."""
        specs = self.format.tensors(self.rows, self.columns)
        name, part = next(iter(self.parts.items()))
        stack = part.shape[: part.dim() - len(specs[name].shape)]
        return prod(stack) * self.rows * self.columns

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[..., rows, columns]: computed in float32 and then rounded."""
        return self.format.dequantize(self.parts, self.columns).to(dtype)

    def targets(self, name: str) -> dict[str, Tensor]:
        """Checkpoint names of a single weight's tensors, and the memory they fill."""
        return {f"{name}.{suffix}": part for suffix, part in self.parts.items()}

    def check(self, name: str) -> None:
        """Check the values that the formula relies on; shapes and NaN are the loader's matter.

        Args:
            name: of the module, or of the modules that are stacked, for errors.

        Raises:
            UserError: a stored shape is not that of the weight, or a scale to divide by is zero.
        """
        for suffix, spec in self.format.tensors(self.rows, self.columns).items():
            part = self.parts[suffix]
            if spec.expected is not None:
                wrong = part != part.new_tensor(spec.expected)
                if bool(wrong.any()):
                    found = part[wrong.any(-1)].view(-1, len(spec.expected))[0].tolist()
                    raise UserError(
                        f"tensor {name}.{suffix} holds {found}, but the model's config makes it {list(spec.expected)}"
                    )
            if spec.divisor and not bool((part > 0).all()):
                raise UserError(
                    f"tensor {name}.{suffix} holds a scale that is not positive, and weights are divided by it"
                )
