"""Llama, Qwen2 and Qwen3 against transformers, fp32, through the paged attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_oracle import BASE, check, oracle, reference_logits
from paged_steps import build, close, fill, prompt
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from server.engine.models.config import ModelConfig

ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn-all": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "yarn-factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "attention_factor": 1.3,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32, "num_key_value_heads": 6},
        {"num_key_value_heads": 1, "rms_norm_eps": 1e-3},
    ],
    ids=["plain", "tied", "biases", "wide heads, no grouping", "one kv head, large eps"],
)
def test_llama(options: dict[str, Any], tmp_path: Path) -> None:
    check(LlamaConfig(**BASE | options), tmp_path)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_llama_rope(rope: dict[str, Any], tmp_path: Path) -> None:
    check(LlamaConfig(**BASE, rope_parameters=dict(rope)), tmp_path)


def test_qwen2(tmp_path: Path) -> None:
    check(Qwen2Config(**BASE), tmp_path)


@pytest.mark.parametrize(
    "options",
    [{}, {"head_dim": 16, "tie_word_embeddings": True}, {"attention_bias": True, "head_dim": 8}],
    ids=["class default head_dim", "tied", "biases"],
)
def test_qwen3(options: dict[str, Any], tmp_path: Path) -> None:
    check(Qwen3Config(**BASE | options), tmp_path)


def test_bfloat16_stays_close_to_the_fp32_oracle_in_packed_layout(tmp_path: Path) -> None:
    hf, saved, tensors = oracle(LlamaConfig(**BASE, tie_word_embeddings=True), tmp_path)
    paged = build(ModelConfig.from_hf(saved), dtype=torch.bfloat16)
    fill(paged.model, tensors)
    ids = prompt(4, 30, 96)
    expected = reference_logits(hf, ids)
    got = torch.cat(
        [paged.step({"row": ids[:20]})["row"], *(paged.step({"row": [token]})["row"] for token in ids[20:])]
    )
    assert close(got, expected) < 0.05 * float(expected.abs().max())
    assert torch.nn.functional.cosine_similarity(got, expected).min() > 0.995
