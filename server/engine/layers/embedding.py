"""Token embeddings."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from server.engine.layers.context import BuildContext
from server.engine.quantization.format import UNQUANTIZED, Unquantized, WeightFormat
from server.engine.quantization.stored import QuantizedTensors
from server.errors import UserError


class VocabEmbedding(nn.Module):
    """One row of weights for each token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, context: BuildContext, weight_format: WeightFormat = UNQUANTIZED
    ) -> None:
        """Make the memory.

        Args:
            vocab_size: rows.
            hidden_size: columns.
            context: dtype, device and prefix.
            weight_format: as stored; a tied head can keep it so, the rows that are looked up are in the model's dtype.
        """
        super().__init__()
        self.context = context
        self.weight = context.parameter(vocab_size, hidden_size)
        self.stored: QuantizedTensors | None = None
        if not isinstance(weight_format, Unquantized):
            self.stored = QuantizedTensors.allocate(weight_format, vocab_size, hidden_size, context.device)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Int64 [T] -> [T, hidden_size]."""
        return F.embedding(input_ids, self.weight)

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names, `prefix` included, and the memory they fill."""
        return self.stored.targets(prefix) if self.stored is not None else {f"{prefix}.weight": self.weight}

    def finish_loading(self) -> None:
        """Dequantise, some rows at a time; what was stored stays for a tied head to take.

        Raises:
            UserError: the stored tensors stand for numbers that are not finite.
        """
        if self.stored is None:
            return
        for start in range(0, len(self.weight), 4096):
            part = QuantizedTensors(
                self.stored.format,
                len(self.weight[start : start + 4096]),
                self.stored.columns,
                {name: values[start : start + 4096] for name, values in self.stored.parts.items()},
            ).dequantize(self.weight.dtype)
            if not bool(part.isfinite().all()):
                raise UserError(f"{self.context.prefix}embed_tokens: it holds values that are NaN or infinite")
            self.weight[start : start + 4096] = part

    def take_stored(self) -> QuantizedTensors | None:
        """What was stored, for the one who keeps it."""
        stored, self.stored = self.stored, None
        return stored
