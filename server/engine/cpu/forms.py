"""In which forms a model's linear layers are kept, and which of them computes a step."""

from __future__ import annotations

from dataclasses import dataclass

ROUNDED = "rounded_8bit"
"""The quantisation of layers that are stored plainly and packed in 8 bits."""


@dataclass(frozen=True)
class WeightForms:
    """Decided before any layer exists."""

    packed: bool = False
    """In 4 or 8 bits as stored, for the C products; layers that are stored otherwise as bfloat16 in their layout."""
    plain: bool = True
    """In the model's dtype, for torch's products."""
    most_packed_tokens: int = 0
    """Where both are kept: steps of more tokens take the plain form."""
    rounded: bool = False
    """Layers that are stored plainly are packed in 8 bits: for a draft, whose rounding changes no answer."""

    def packed_for(self, tokens: int) -> bool:
        """Whether a step of so many tokens takes the packed form."""
        return self.packed and (not self.plain or tokens <= self.most_packed_tokens)


PLAIN = WeightForms()
