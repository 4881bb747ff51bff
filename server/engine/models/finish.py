"""The last part of loading, the same for every kind of model."""

from __future__ import annotations

from torch import nn

from server.engine.layers.embedding import VocabEmbedding
from server.engine.layers.linear import Linear
from server.engine.layers.moe import Experts
from server.engine.layers.norm import QueryKeyNorm


def finish_layers(model: nn.Module) -> None:
    """Bring the filled weights of a model's own layers into the layouts that they compute with; call it once."""
    for module in model.modules():  # embeddings come before heads that are tied to them
        if isinstance(module, VocabEmbedding | Linear | Experts | QueryKeyNorm):
            module.finish_loading()
