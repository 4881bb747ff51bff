"""The tensor names of MTP layers that follow the model's own, as in DeepSeek-V3 and GLM-4.5 checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

from server.checkpoint.gguf_names import target_name
from server.checkpoint.tensor_header import TensorHeader
from server.checkpoint.text_config import is_nested, text_tensor_name
from server.engine.quantization.plain_headers import plain_headers

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
COMBINE = "eh_proj.weight"
"""The tensor that only an MTP layer has."""
EMBEDDING = "embed_tokens.weight"
HEAD = "shared_head.head.weight"


def hf_names(headers: Mapping[str, TensorHeader]) -> set[str]:
    """The tensors under their names in a Hugging Face checkpoint of the text model alone, as if unquantised."""
    names: set[str] = set()
    nested = is_nested(headers)
    gguf = any(name.startswith("blk.") for name in headers)
    for name, header in plain_headers(headers).items():
        if gguf:
            # The one GGUF architecture with MTP layers. Of others, the ends and most tensors have the same names.
            mapped = target_name("glm4moe", name, header.shape)
            names |= set(mapped.names) if mapped else set()
        else:
            own = text_tensor_name(name) if nested else name
            names |= {own} if own else set()
    return names


def nextn_layers(headers: Mapping[str, TensorHeader]) -> dict[int, frozenset[str]]:
    """Index of each MTP layer -> its tensors, without `model.layers.N.`."""
    layers: dict[int, set[str]] = {}
    for name in hf_names(headers):
        match = LAYER.fullmatch(name)
        if match:
            layers.setdefault(int(match[1]), set()).add(match[2])
    return {index: frozenset(parts) for index, parts in sorted(layers.items()) if COMBINE in parts}
