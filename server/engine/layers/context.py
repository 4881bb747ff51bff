"""What a layer needs to be built, handed down explicitly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from server.engine.attention.base import AttentionBackend
from server.engine.cpu.forms import PLAIN, WeightForms
from server.engine.parallel import ParallelGroup
from server.engine.quantization.format import WeightFormat
from server.engine.quantization.formats import Formats


@dataclass(frozen=True)
class BuildContext:
    """Where a model lives, which backends its layers hold, and how their weights are stored."""

    dtype: torch.dtype
    device: torch.device
    attention: AttentionBackend
    moe: str
    """A name of `server.engine.moe.registry`; not read by models without experts."""
    group: ParallelGroup
    formats: Formats = field(default_factory=Formats)
    """Of the checkpoint that will fill the model; without any, all weights are unquantised."""
    forms: WeightForms = PLAIN
    """In which forms linear layers are kept."""
    prefix: str = ""
    """Where in the checkpoint the layer that is built lies, with a dot at its end."""

    def under(self, name: str) -> BuildContext:
        """The context of a part of what is built here: `formats` are looked up under its name."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def weight_format(self, names: Iterable[str]) -> WeightFormat:
        """The format of modules under the prefix that are computed together.

        Raises:
            UserError: they differ, or one of them cannot be served; the planner asks before.
        """
        return self.formats.common(f"{self.prefix}{name}" for name in names)

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Memory for a weight, not initialised; in the model's dtype unless another is given."""
        memory = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(memory, requires_grad=False)
