"""Configs, names and rope scaling made from GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from server.checkpoint.gguf_config import config_from_gguf
from server.checkpoint.gguf_header import GGUFHeader, read_gguf_header
from server.checkpoint.gguf_names import LAYER_NAMES, target_name
from server.checkpoint.gguf_rope import llama3_divisors
from server.errors import UserError

SIZES = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}
MOE = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}


def header(
    folder: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, Any] | None = None, **metadata: Any
) -> GGUFHeader:
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in ({f"{architecture}.{key}": value for key, value in keys.items()} | metadata).items():
        match value:
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, array in ({"token_embd.weight": np.zeros((40, 64), np.float32)} | (tensors or {})).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf_header(file)


def test_llama(tmp_path: Path) -> None:
    config = config_from_gguf(header(tmp_path, "llama", SIZES))
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 40,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "float32",
    }
    assert expected.items() <= config.items()


def test_what_only_the_tensors_tell(tmp_path: Path) -> None:
    tensors = {
        "output.weight": np.zeros((40, 64), np.float16),
        "blk.0.attn_q.bias": np.zeros(64, np.float32),
        "blk.0.ffn_up.bias": np.zeros(96, np.float32),
    }
    config = config_from_gguf(header(tmp_path, "llama", SIZES, tensors))
    assert (config["tie_word_embeddings"], config["attention_bias"], config["mlp_bias"]) == (False, True, True)
    assert config["torch_dtype"] == "bfloat16"


def test_heads_may_be_listed_per_layer(tmp_path: Path) -> None:
    assert (
        config_from_gguf(header(tmp_path, "qwen3", SIZES | {"attention.head_count_kv": [2, 2]}))["num_key_value_heads"]
        == 2
    )
    with pytest.raises(UserError, match="qwen3.attention.head_count_kv is \\[2, 4\\]"):
        config_from_gguf(header(tmp_path, "qwen3", SIZES | {"attention.head_count_kv": [2, 4]}))


def test_qwen3_moe(tmp_path: Path) -> None:
    config = config_from_gguf(
        header(tmp_path, "qwen3moe", SIZES | MOE | {"attention.key_length": 32, "attention.value_length": 32})
    )
    expected = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    assert expected.items() <= config.items()


def test_glm4_moe_does_not_count_its_next_token_layer(tmp_path: Path) -> None:
    keys = (
        SIZES
        | MOE
        | {
            "block_count": 4,
            "nextn_predict_layers": 1,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_scale": 2.5,
            "expert_gating_func": 2,
            "rope.dimension_count": 8,
        }
    )
    config = config_from_gguf(header(tmp_path, "glm4moe", keys, {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}))
    expected = {
        "architectures": ["Glm4MoeForCausalLM"],
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    }
    assert expected.items() <= config.items()


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("gemma3", {}, "'gemma3' is not supported; supported: llama"),
        ("llama", {"block_count": None}, "llama.block_count is missing"),
        ("llama", {"embedding_length": "many"}, "llama.embedding_length is many"),
        ("llama", {"attention.head_count": 0}, "must be at least 1"),
        ("llama", {"expert_count": 8}, "with experts is not supported"),
        ("llama", {"attention.key_length": 16, "attention.value_length": 8}, "differ"),
        ("llama", {"rope.dimension_count": 8}, "rope.dimension_count 8 differs"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "'longrope' is not supported"),
        ("llama", {"rope.scaling.type": "yarn"}, "rope.scaling.factor is missing"),
        ("glm4moe", MOE | {"expert_gating_func": 1}, "expert_gating_func 1"),
        ("glm4moe", MOE | {"nextn_predict_layers": 2}, "no layer beside them"),
    ],
)
def test_refusals(tmp_path: Path, architecture: str, change: dict[str, Any], message: str) -> None:
    keys = {key: value for key, value in (SIZES | change).items() if value is not None}
    with pytest.raises(UserError, match=message):
        config_from_gguf(header(tmp_path, architecture, keys))


def test_a_split_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one part of a split"):
        config_from_gguf(header(tmp_path, "llama", SIZES, **{"split.count": 2}))


def test_rope_scaling_keys(tmp_path: Path) -> None:
    linear = SIZES | {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert config_from_gguf(header(tmp_path, "qwen3", linear))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = linear | {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 128}
    assert config_from_gguf(header(tmp_path, "qwen3", yarn))["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (8.0, 4096)])
def test_llama3_parameters_are_found_again(tmp_path: Path, factor: float, original: int) -> None:
    divisors = np.array(llama3_divisors(500000.0, 16, factor, original), dtype=np.float32)
    config = config_from_gguf(header(tmp_path, "llama", SIZES, {"rope_freqs.weight": divisors}))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no llama3 rope scaling"):
        config_from_gguf(
            header(tmp_path, "llama", SIZES, {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)})
        )
    with pytest.raises(UserError, match=r"not F32 \[8\]"):
        config_from_gguf(header(tmp_path, "llama", SIZES, {"rope_freqs.weight": np.ones(4, np.float32)}))


@pytest.mark.parametrize("architecture", LAYER_NAMES)
def test_every_tensor_of_the_formats_own_table_has_a_name(architecture: str) -> None:
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    optional = {"rope_freqs", "blk.{bid}.attn_rot_embd"}
    if architecture == "llama":  # Mixtral, which is refused by its expert count
        optional |= {"blk.{bid}.ffn_gate_inp"} | {f"blk.{{bid}}.ffn_{part}_exps" for part in ("gate", "up", "down")}
    for tensor in gguf.MODEL_TENSORS[arch]:
        stem = gguf.TENSOR_NAMES[tensor]
        if stem not in optional:
            kind = "bias" if stem.endswith("exp_probs_b") else "weight"
            shape = (8, 4, 4) if stem.endswith("_exps") else (4, 4)
            assert target_name(architecture, f"{stem.format(bid=3)}.{kind}", shape) is not None, stem


def test_stacked_experts_get_a_name_each() -> None:
    target = target_name("glm4moe", "blk.7.ffn_down_exps.weight", (3, 64, 32))
    assert target is not None
    assert target.names == tuple(f"model.layers.7.mlp.experts.{i}.down_proj.weight" for i in range(3))


def test_only_llama_regroups_rows() -> None:
    assert target_name("llama", "blk.0.attn_q.bias", (64,)).rows_of == "q"  # type: ignore[union-attr]
    assert target_name("llama", "blk.0.attn_v.weight", (64, 64)).rows_of is None  # type: ignore[union-attr]
    assert target_name("qwen2", "blk.0.attn_q.weight", (64, 64)).rows_of is None  # type: ignore[union-attr]
    assert target_name("llama", "blk.0.attn_q_norm.weight", (64,)) is None
    assert target_name("llama", "blk.0.attn_q.scale", (64,)) is None
