"""Checkpoints that nest a text model inside a multimodal one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
"""Text models whose config and weights can stand alone, by the `model_type` inside `text_config`."""

_BODIES = ("model.language_model.", "language_model.model.")
_HEAD = "language_model.lm_head."


def flatten_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Lift `text_config` to the top when it describes one of `TEXT_CLASSES`; else return the config as it is.

    The result names the text model's class. Token ids and dtype that only the outer config holds are kept.
    """
    inner = config.get("text_config")
    if not isinstance(inner, Mapping) or inner.get("model_type") not in TEXT_CLASSES:
        return dict(config)
    outer = ("torch_dtype", "dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config")
    kept = {key: config[key] for key in outer if key in config}
    return kept | dict(inner) | {"architectures": [TEXT_CLASSES[inner["model_type"]]]}


def is_nested(names: Mapping[str, Any]) -> bool:
    """Whether these tensor names are those of a multimodal checkpoint."""
    return any(name.startswith(_BODIES) for name in names)


def text_tensor_name(name: str) -> str | None:
    """The text model's own name of a tensor in a nested checkpoint; None if it belongs to another part."""
    for prefix in _BODIES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    if name.startswith(_HEAD):
        return "lm_head." + name.removeprefix(_HEAD)
    return name if name.startswith("lm_head.") else None
