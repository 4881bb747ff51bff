"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from server.engine.layers.hf_keys import Keys
from server.engine.models.family import Family, Options


def _options(keys: Keys) -> Options:
    return Options(qkv_bias=True)


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    options=_options,
)
