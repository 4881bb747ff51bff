"""Qwen3, dense: RMS norms on every query and key head, before the rotation."""

from __future__ import annotations

from server.engine.layers.hf_keys import Keys
from server.engine.models.family import Family, Options


def _options(keys: Keys) -> Options:
    bias = keys.flag("attention_bias")
    return Options(qkv_bias=bias, o_bias=bias, qk_norm=True)


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    options=_options,
)
