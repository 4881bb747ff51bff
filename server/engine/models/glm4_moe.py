"""GLM-4.5 with experts: half of each head turns, sigmoid routing by groups, shared experts, an MTP layer behind."""

from __future__ import annotations

from server.engine.layers.hf_keys import Keys
from server.engine.models.family import Family, MoEConfig, Options, top_k


def _options(keys: Keys) -> Options:
    return Options(qkv_bias=keys.flag("attention_bias"), qk_norm=keys.flag("use_qk_norm"), moe=_experts(keys))


def _experts(keys: Keys) -> MoEConfig:
    experts = keys.integer("num_local_experts" if "num_local_experts" in keys else "n_routed_experts")
    groups, kept = keys.integer("n_group"), keys.integer("topk_group")
    if experts % groups or experts // groups < 2:
        raise keys.bad("n_group", f"a divisor of the {experts} experts that leaves two or more in a group")
    if kept > groups:
        raise keys.bad("topk_group", f"at most n_group = {groups}")
    width = keys.integer("moe_intermediate_size")
    shared = keys.integer("n_shared_experts", 0) if "n_shared_experts" in keys else 0
    return MoEConfig(
        layers=tuple(range(keys.integer("first_k_dense_replace", 0), keys.integer("num_hidden_layers"))),
        num_experts=experts,
        top_k=top_k(keys, experts // groups * kept),
        intermediate_size=width,
        scoring="sigmoid",
        renormalize=keys.flag("norm_topk_prob"),
        routed_scaling_factor=keys.number("routed_scaling_factor"),
        num_groups=groups,
        topk_groups=kept,
        shared_intermediate_size=shared * width,
    )


GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    defaults={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    options=_options,
)
