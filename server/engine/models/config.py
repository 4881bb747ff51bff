"""A model's shape and options, read once from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.engine.layers.hf_keys import Keys
from server.engine.layers.rope import RopeConfig
from server.engine.models.family import Family, MoEConfig
from server.engine.models.registry import FAMILIES
from server.engine.quantization.metadata import declared_method
from server.errors import UserError


@dataclass(frozen=True)
class ModelConfig:
    """Everything that building a model needs to know."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    moe: MoEConfig | None
    num_nextn_predict_layers: int
    """MTP layers that the checkpoint may hold after layer `num_layers - 1`."""
    own_embedding: bool = True
    """False for a draft whose checkpoint has none: it uses its target's."""
    own_head: bool = True
    """Likewise."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face config; what it leaves out has the value that its class has in transformers.

        Raises:
            UserError: an architecture, rope type, activation or option that is not supported, or a value that is
                missing, of the wrong type or out of range.
        """
        family = _family(config)
        keys = Keys(config, family.defaults)
        _refuse_unsupported(keys)
        heads = keys.integer("num_attention_heads")
        kv_heads = keys.integer("num_key_value_heads") if "num_key_value_heads" in keys else heads
        if heads % kv_heads:
            raise keys.bad("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
        hidden = keys.integer("hidden_size")
        head_dim = keys.integer("head_dim") if "head_dim" in keys else hidden // heads
        max_position = keys.integer("max_position_embeddings")
        rotary_factor = family.defaults.get("partial_rotary_factor", 1.0)
        options = family.options(keys)
        return cls(
            architecture=family.architecture,
            vocab_size=keys.integer("vocab_size"),
            hidden_size=hidden,
            num_layers=keys.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=keys.integer("intermediate_size"),
            rms_norm_eps=keys.number("rms_norm_eps"),
            rope=RopeConfig.from_hf(config, head_dim, max_position, rotary_factor),
            max_position_embeddings=max_position,
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            qkv_bias=options.qkv_bias,
            o_bias=options.o_bias,
            mlp_bias=options.mlp_bias,
            qk_norm=options.qk_norm,
            moe=options.moe,
            num_nextn_predict_layers=_nextn(keys),
        )


def _family(config: Mapping[str, Any]) -> Family:
    """By architecture; by `model_type` where the config names none."""
    named = config.get("architectures") or []
    by_type = {family.model_type: family for family in FAMILIES.values()}
    known = [FAMILIES[architecture] for architecture in named if architecture in FAMILIES]
    if not named and config.get("model_type") in by_type:
        known = [by_type[config["model_type"]]]
    if not known:
        found = ", ".join(map(str, named)) or f"with model_type {config.get('model_type')!r}"
        raise UserError(f"model architecture {found} is not supported; supported are {', '.join(FAMILIES)}")
    return known[0]


def _refuse_unsupported(keys: Keys) -> None:
    """Raise for options that change the arithmetic in ways that this build does not compute."""
    if keys.values.get("hidden_act") != "silu":
        raise keys.bad("hidden_act", "'silu', the one activation that is supported")
    declared_method(keys.values)  # raises for methods that are not supported
    layer_types = keys.values.get("layer_types")
    if layer_types is None and keys.flag("use_sliding_window") and "sliding_window" in keys:
        first = keys.integer("max_window_layers", 0) if "max_window_layers" in keys else 0
        layer_types = ["sliding_attention"] if first < keys.integer("num_hidden_layers") else []
    other = sorted({str(kind) for kind in layer_types or [] if kind != "full_attention"})
    if other:
        raise UserError(f"config.json: layers of type {', '.join(other)} are not supported; only full_attention is")


def _nextn(keys: Keys) -> int:
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if name in keys:
            return keys.integer(name, 0)
    return 0
