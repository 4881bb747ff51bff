"""Weights of the target as its checkpoint holds them, for a head that starts from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.gguf_header import read_gguf_header
from server.checkpoint.headers import read_headers
from server.engine.loading.gguf_source import gguf_sources
from server.engine.loading.safetensors_source import safetensors_sources
from server.engine.loading.source import WeightSource


class TargetWeights:
    """Tensors by their Hugging Face names, in fp32."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read the headers of a located checkpoint."""
        sources: Sequence[WeightSource]
        if checkpoint.format == "gguf":
            sources = gguf_sources(read_gguf_header(checkpoint.path), checkpoint.config)
        else:
            sources = safetensors_sources(read_headers(checkpoint))
        self._sources = {source.name: source for source in sources}

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def __getitem__(self, name: str) -> Tensor:
        """One tensor, [*shape] in fp32; KeyError for a name that the checkpoint lacks."""
        source = self._sources[name]
        tensor = torch.empty(source.shape)
        source.copy_to(tensor)
        return tensor

    @property
    def embedding(self) -> Tensor:
        """[V, H]."""
        return self["model.embed_tokens.weight"]

    @property
    def head(self) -> Tensor:
        """[V, H], the embedding where the two are tied."""
        name = "lm_head.weight"
        return self[name] if name in self else self.embedding

    def get(self, name: str) -> Tensor | None:
        """One tensor, or None where the checkpoint lacks it."""
        return self[name] if name in self else None
