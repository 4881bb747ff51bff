"""Qwen3-MoE: Qwen3's attention, experts chosen by a softmax, no shared expert."""

from __future__ import annotations

from server.engine.layers.hf_keys import Keys
from server.engine.models.family import Family, MoEConfig, Options, top_k


def _options(keys: Keys) -> Options:
    bias = keys.flag("attention_bias")
    return Options(qkv_bias=bias, o_bias=bias, qk_norm=True, moe=_experts(keys))


def _experts(keys: Keys) -> MoEConfig | None:
    # transformers 5 writes the first name, the files of the hub have the second.
    experts = keys.integer("num_local_experts" if "num_local_experts" in keys else "num_experts", 0)
    dense = keys.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise keys.bad("mlp_only_layers", "a list of layer indices")
    step = keys.integer("decoder_sparse_step")
    layers = [i for i in range(keys.integer("num_hidden_layers")) if i not in dense and (i + 1) % step == 0]
    if not experts or not layers:
        return None
    return MoEConfig(
        layers=tuple(layers),
        num_experts=experts,
        top_k=top_k(keys, experts),
        intermediate_size=keys.integer("moe_intermediate_size"),
        scoring="softmax",
        renormalize=keys.flag("norm_topk_prob"),
    )


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    options=_options,
)
