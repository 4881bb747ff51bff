"""Qwen3-MoE and GLM-4.5-MoE against transformers, fp32, through the paged attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_oracle import BASE, check, oracle
from paged_steps import build, fill
from transformers import Glm4MoeConfig, Qwen3MoeConfig

from server.engine.models.config import ModelConfig

QWEN = BASE | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
GLM = BASE | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "attention_bias": True,
}


@pytest.mark.parametrize("moe", ["torch", "grouped_mm"])
@pytest.mark.parametrize(
    "options",
    [
        {"norm_topk_prob": True},
        {"norm_topk_prob": False},
        {"decoder_sparse_step": 2, "norm_topk_prob": True},
        {"mlp_only_layers": [0, 2], "tie_word_embeddings": True},
        {"num_experts_per_tok": 8, "attention_bias": True},
        {"num_experts_per_tok": 1},
    ],
    ids=["renormalised", "not renormalised", "sparse step", "dense layers", "all experts", "one expert"],
)
def test_qwen3_moe(options: dict[str, Any], moe: str, tmp_path: Path) -> None:
    check(Qwen3MoeConfig(**QWEN | options), tmp_path, moe)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("moe", ["torch", "grouped_mm"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_qk_norm": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2},
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "first_k_dense_replace": 0},
        {"n_group": 2, "topk_group": 1, "n_shared_experts": 2},
        {"n_shared_experts": 0, "attention_bias": False, "tie_word_embeddings": True},
        {"partial_rotary_factor": 1.0, "n_group": 2, "topk_group": 2},
    ],
    ids=["plain", "as 355B", "4 groups, keep 2", "2 groups, 2 shared", "none shared", "whole rotary"],
)
def test_glm4_moe(options: dict[str, Any], moe: str, tmp_path: Path) -> None:
    check(Glm4MoeConfig(**GLM | options), tmp_path, moe)


def test_glm_rope_scaling_on_half_a_head(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 32}
    check(Glm4MoeConfig(**GLM, rope_parameters=rope), tmp_path)


def test_mtp_tensors_are_left_for_the_draft(tmp_path: Path) -> None:
    _, saved, tensors = oracle(Glm4MoeConfig(**GLM), tmp_path)
    model = build(ModelConfig.from_hf(saved)).model
    mtp = ("eh_proj", "enorm", "embed_tokens", "shared_head.head", "mlp.experts.7.up_proj", "self_attn.q_proj")
    for part in mtp:
        assert model.ignored_weight(f"model.layers.3.{part}.weight")
        assert not model.ignored_weight(f"model.layers.4.{part}.weight")
        assert not model.ignored_weight(f"model.layers.2.{part}.weight")
    fill(model, tensors | {f"model.layers.3.{part}.weight": torch.zeros(1) for part in mtp})


def test_correction_bias_and_gate_stay_fp32_in_a_bf16_model(tmp_path: Path) -> None:
    _, saved, _ = oracle(Glm4MoeConfig(**GLM), tmp_path)
    targets = build(ModelConfig.from_hf(saved), dtype=torch.bfloat16).model.weight_targets()
    dtypes = {name.rsplit(".", 2)[-1 if "e_score" in name else -2]: tensor.dtype for name, tensor in targets.items()}
    assert dtypes["e_score_correction_bias"] is torch.float32
    assert dtypes["gate"] is torch.float32
    assert dtypes["gate_proj"] is torch.bfloat16
