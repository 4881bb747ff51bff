"""The decoder layers of an EAGLE-3 head as a `ModelConfig`, from whatever its producer wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from server.engine.models.config import ModelConfig
from server.engine.models.family import MoEConfig
from server.engine.models.registry import FAMILIES
from server.errors import UserError

_LAYER = re.compile(r"layers\.(\d+)\.")
_FIRST = "layers.0."


def layer_config(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target_vocab_size: int
) -> ModelConfig:
    """Read the layers' shape.

    Producers copy the target's config over and leave keys behind, so the tensors decide on biases, head norms, experts
    and the number of layers. Rope is the head's own: a config without `rope_theta` means 10000, whatever the target's.

    Args:
        config: the head's config.json. speculators nests the layer in `transformer_layer_config`, as a difference to
            its class.
        shapes: by canonical name; empty without files.
        target_vocab_size: V.

    Raises:
        UserError: see `ModelConfig.from_hf`.
    """
    nested = config.get("transformer_layer_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise UserError(f"the draft's config.json: transformer_layer_config is {nested!r}; it must be an object")
    values = dict(config if nested is None else nested)
    values["vocab_size"] = target_vocab_size
    # speculators' class for a layer that names none is Qwen3's.
    model_type = values.get("model_type", "llama" if nested is None else "qwen3")
    family = _family(model_type, shapes)
    values["architectures"] = [family]
    if shapes:
        values["num_hidden_layers"] = 1 + max((int(m[1]) for name in shapes if (m := _LAYER.match(name))), default=0)
    elif nested is None:
        values.setdefault("num_hidden_layers", 1)
    model = ModelConfig.from_hf(values)
    named = config.get("architectures") or [family]
    model = replace(model, architecture=str(named[0]), num_nextn_predict_layers=0)
    return _as_built(model, shapes) if shapes else model


def _family(model_type: Any, shapes: Mapping[str, Any]) -> str:
    by_type = {family.model_type: family.architecture for family in FAMILIES.values()}
    if any(".mlp.gate.weight" in name for name in shapes):
        corrected = any(name.endswith("e_score_correction_bias") for name in shapes)
        return by_type["glm4_moe" if corrected else "qwen3_moe"]
    if shapes and model_type not in ("llama", "qwen2", "qwen3"):
        # Dense layers for a target with experts: its keys for them are left-overs.
        return by_type["qwen3" if f"{_FIRST}self_attn.q_norm.weight" in shapes else "llama"]
    return by_type.get(str(model_type), by_type["llama"])


def _as_built(model: ModelConfig, shapes: Mapping[str, Any]) -> ModelConfig:
    moe = model.moe
    if moe is not None:
        moe = _experts_of(moe, shapes)
    return replace(
        model,
        qkv_bias=f"{_FIRST}self_attn.q_proj.bias" in shapes,
        o_bias=f"{_FIRST}self_attn.o_proj.bias" in shapes,
        mlp_bias=f"{_FIRST}mlp.down_proj.bias" in shapes,
        qk_norm=f"{_FIRST}self_attn.q_norm.weight" in shapes,
        moe=moe,
    )


def _experts_of(moe: MoEConfig, shapes: Mapping[str, Any]) -> MoEConfig | None:
    layers = tuple(sorted({int(m[1]) for name in shapes if (m := _LAYER.match(name)) and ".mlp.gate.weight" in name}))
    if not layers:
        return None
    shared = any(".mlp.shared_experts." in name for name in shapes)
    return replace(moe, layers=layers, shared_intermediate_size=moe.shared_intermediate_size if shared else 0)
