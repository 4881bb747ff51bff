"""The linear modules of a model, by the names that checkpoints give them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from server.engine.models.config import ModelConfig

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def linear_names(config: ModelConfig) -> Iterator[str]:
    """All of them, those of MTP layers included; no weight of a checkpoint is needed to know them."""
    for index in range(config.num_layers + config.num_nextn_predict_layers):
        prefix = f"model.layers.{index}."
        yield from (f"{prefix}self_attn.{name}" for name in _ATTENTION)
        if index >= config.num_layers:
            yield f"{prefix}eh_proj"
        moe = config.moe
        if moe is None or index < config.num_layers and index not in moe.layers:
            yield from (f"{prefix}mlp.{name}" for name in _MLP)
            continue
        yield from (f"{prefix}mlp.experts.{expert}.{name}" for expert in range(moe.num_experts) for name in _MLP)
        if moe.shared_intermediate_size:
            yield from (f"{prefix}mlp.shared_experts.{name}" for name in _MLP)
    yield "lm_head"


def target_modules(config: ModelConfig) -> Callable[[str], bool]:
    """Tells the model's own modules from those of MTP layers and of other parts of a checkpoint."""

    def belongs(module: str) -> bool:
        layer = _LAYER.match(module)
        return int(layer[1]) < config.num_layers if layer else module in ("lm_head", "model.embed_tokens")

    return belongs
