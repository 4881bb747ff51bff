"""Token embeddings."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from server.engine.layers.context import BuildContext


class VocabEmbedding(nn.Module):
    """One row of weights for each token id."""

    def __init__(self, vocab_size: int, hidden_size: int, context: BuildContext) -> None:
        super().__init__()
        self.weight = context.parameter(vocab_size, hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Int64 [T] -> [T, hidden_size]."""
        return F.embedding(input_ids, self.weight)

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names, `prefix` included, and the memory they fill."""
        return {f"{prefix}.weight": self.weight}
