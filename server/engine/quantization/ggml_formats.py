"""Which linear modules of a GGUF file can stay in its blocks."""

from __future__ import annotations

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.gguf_header import read_gguf_header
from server.checkpoint.gguf_names import target_name
from server.engine.models.config import ModelConfig
from server.engine.models.linear_names import linear_names
from server.engine.quantization.format import UNQUANTIZED, WeightFormat
from server.engine.quantization.ggml import KEPT, GgmlBlocks
from server.engine.quantization.modules import COMPUTED_TOGETHER

_EMBEDDING = "model.embed_tokens"


def block_formats(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, WeightFormat]:
    """The formats of all linear modules but experts; unquantised are those whose blocks cannot be kept.

    Modules that are computed together keep theirs only if they are alike. A tied head is stored as the embedding.

    Raises:
        UserError: the header cannot be read.
    """
    header = read_gguf_header(checkpoint.path)
    architecture: str = header.metadata["general.architecture"]
    types: dict[str, str] = {}
    for tensor in header.tensors.values():
        target = target_name(architecture, tensor.name, tensor.shape)
        if target is not None and not target.stacked:
            types[target.names[0].removesuffix(".weight")] = tensor.dtype
    if config.tie_word_embeddings:
        types["lm_head"] = types.get(_EMBEDDING, "")
    by_type: dict[str, WeightFormat] = {name: GgmlBlocks(name) for name in KEPT}
    kept = {name: by_type.get(types.get(name, ""), UNQUANTIZED) for name in linear_names(config)}
    for together in COMPUTED_TOGETHER:
        groups: dict[str, list[str]] = {}
        for name in kept:
            if match := together.fullmatch(name):
                groups.setdefault(match[1], []).append(name)
        for names in groups.values():
            if len({kept[name] for name in names}) > 1:
                kept |= dict.fromkeys(names, UNQUANTIZED)
    return kept
