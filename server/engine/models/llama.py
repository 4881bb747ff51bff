"""Llama: Llama 2 and 3, SmolLM2."""

from __future__ import annotations

from server.engine.layers.hf_keys import Keys
from server.engine.models.family import Family, Options


def _options(keys: Keys) -> Options:
    bias = keys.flag("attention_bias")
    return Options(qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias"))


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    options=_options,
)
