"""What a config.json means, as hubs and tools write it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_context import context

from server.engine.models.config import ModelConfig
from server.engine.models.decoder import build_model
from server.engine.models.registry import FAMILIES
from server.engine.parallel import ParallelGroup
from server.errors import UserError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
QWEN_MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
GLM = LLAMA | {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2}


def read(base: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(base | changes)


def test_head_counts_and_widths() -> None:
    assert read(LLAMA).head_dim == 8
    assert read(LLAMA, head_dim=None).head_dim == 8
    assert read(LLAMA, head_dim=32).head_dim == 32
    assert read(LLAMA, num_key_value_heads=None).num_kv_heads == 6
    qwen3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
    assert read(qwen3).head_dim == 128  # the class default, unlike the MoE's
    assert read(QWEN_MOE).head_dim == 8


def test_biases_by_family() -> None:
    def biases(architecture: str) -> tuple[bool, bool]:
        config = read(LLAMA, architectures=[architecture], attention_bias=True, num_experts_per_tok=2)
        return config.qkv_bias, config.o_bias

    assert biases("LlamaForCausalLM") == (True, True)
    assert biases("Qwen3ForCausalLM") == (True, True)
    assert biases("Qwen2ForCausalLM") == (True, False)
    assert biases("Glm4MoeForCausalLM") == (True, False)
    assert read(LLAMA, architectures=["Qwen2ForCausalLM"]).qkv_bias


def test_both_spellings_of_the_expert_count() -> None:
    renamed = {name: value for name, value in QWEN_MOE.items() if name != "num_experts"} | {"num_local_experts": 8}
    assert read(renamed).moe == read(QWEN_MOE).moe
    moe = read(QWEN_MOE).moe
    assert moe is not None
    assert (moe.num_experts, moe.renormalize, moe.layers) == (8, False, (0, 1))


def test_which_layers_have_experts() -> None:
    def layers(base: dict[str, Any], **changes: Any) -> tuple[int, ...]:
        moe = read(base, num_hidden_layers=6, **changes).moe
        return moe.layers if moe else ()

    assert layers(QWEN_MOE, decoder_sparse_step=2) == (1, 3, 5)
    assert layers(QWEN_MOE, mlp_only_layers=[0, 4]) == (1, 2, 3, 5)
    assert layers(QWEN_MOE, decoder_sparse_step=2, mlp_only_layers=[1]) == (3, 5)
    assert layers(QWEN_MOE, mlp_only_layers=[0, 1, 2, 3, 4, 5]) == ()
    assert layers(GLM, first_k_dense_replace=3) == (3, 4, 5)


def test_what_is_absent_is_the_class_default() -> None:
    config = ModelConfig.from_hf({"model_type": "glm4_moe", "head_dim": 128})
    assert (config.architecture, config.num_layers, config.num_heads) == ("Glm4MoeForCausalLM", 46, 96)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.shared_intermediate_size, config.moe.renormalize) == (128, 1408, True)
    assert (config.rms_norm_eps, config.num_nextn_predict_layers, config.qk_norm) == (1e-5, 1, False)
    assert config.rope.rotary_dim == 64
    assert read(LLAMA).max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA, {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; supported are Llama"),
        (LLAMA, {"architectures": [], "model_type": "mamba"}, "with model_type 'mamba' is not supported"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        (LLAMA, {"num_key_value_heads": 4}, "num_key_value_heads is 4; it must be a divisor of"),
        (LLAMA, {"vocab_size": "64"}, "vocab_size is '64'; it must be a whole number"),
        (LLAMA, {"vocab_size": True}, "vocab_size is True"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (LLAMA, {"hidden_size": None}, "hidden_size is None"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        (LLAMA, {"quantization_config": {"quant_method": "awq"}}, "'awq' is not supported"),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "type sliding_attention are not supported"),
        (QWEN_MOE, {"use_sliding_window": True}, "type sliding_attention"),
        (QWEN_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be at most 8"),
        (QWEN_MOE, {"mlp_only_layers": 3}, "mlp_only_layers is 3; it must be a list"),
        (GLM, {"n_group": 3}, "n_group is 3; it must be a divisor of the 8 experts"),
        (GLM, {"n_group": 8}, "two or more in a group"),
        (GLM, {"n_group": 2, "topk_group": 3}, "topk_group is 3; it must be at most n_group = 2"),
        (GLM, {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "at most 2, the number of experts"),
    ],
)
def test_refusals(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(base, **changes)


def test_a_sliding_window_that_no_layer_uses_is_fine() -> None:
    qwen2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
    assert read(qwen2, max_window_layers=2).num_layers == 2
    assert read(qwen2, use_sliding_window=False, max_window_layers=0).num_layers == 2
    with pytest.raises(UserError, match="sliding_attention"):
        read(qwen2, max_window_layers=1)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_targets_cover_every_parameter_once(architecture: str) -> None:
    config = read(LLAMA, architectures=[architecture], num_experts_per_tok=2, num_experts=4, n_routed_experts=4)
    model = build_model(config, context())
    targets = model.weight_targets()
    assert sum(target.numel() for target in targets.values()) == model.num_parameters
    for count, target in enumerate(targets.values(), 1):
        target.fill_(count)
    for count, target in enumerate(targets.values(), 1):
        assert bool((target == count).all())  # no two overlap


def test_tied_models_ignore_a_head_and_untied_ones_need_it() -> None:
    tied = build_model(read(LLAMA, tie_word_embeddings=True), context())
    untied = build_model(read(LLAMA), context())
    assert tied.ignored_weight("lm_head.weight")
    assert "lm_head.weight" not in tied.weight_targets()
    assert not untied.ignored_weight("lm_head.weight")
    assert untied.weight_targets()["lm_head.weight"].shape == (64, 48)
    assert tied.ignored_weight("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not tied.ignored_weight("model.layers.2.mlp.up_proj.weight")
    assert tied.num_parameters == untied.num_parameters - 64 * 48


def test_more_than_one_rank_is_refused() -> None:
    with pytest.raises(UserError, match="tensor_parallel_size = 2"):
        build_model(read(LLAMA), context(torch.float32, ParallelGroup(0, 2)))
