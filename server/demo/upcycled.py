"""The embedded model as a mixture of experts, in GLM-4.5-MoE's layout: one whose right answers are known.

Each layer's feed-forward part is cut in four. Three parts become the shared expert, which every token passes; the
fourth becomes each of 8 experts, of which a router of chance takes 2 under weights that sum to 1. So the sums are the
dense model's up to rounding, whichever experts are chosen. (Upcycling: Komatsuzaki et al. 2022, arXiv 2212.05055.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.gguf_header import read_gguf_header
from server.engine.loading.gguf_source import gguf_sources

EXPERTS, TOP, PARTS = 8, 2, 4
KEPT = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)
"""Settings of the dense model that hold for its experts, too."""


def upcycled_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors in bf16 (routers in fp32, as they are computed).

    Args:
        checkpoint: of the embedded model, a GGUF file.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = int(checkpoint.config["hidden_size"])
    for source in gguf_sources(read_gguf_header(checkpoint.path), checkpoint.config):
        tensor = torch.empty(source.shape)
        source.copy_to(tensor)
        tensor = tensor.bfloat16()
        block, _, part = source.name.removesuffix(".weight").rpartition(".")
        if part not in ("gate_proj", "up_proj", "down_proj"):
            yield source.name, tensor
            continue
        dim = 1 if part == "down_proj" else 0
        *shared, last = tensor.chunk(PARTS, dim)
        yield f"{block}.shared_experts.{part}.weight", torch.cat(shared, dim)
        for expert in range(EXPERTS):
            yield f"{block}.experts.{expert}.{part}.weight", last.clone()
        if part == "gate_proj":
            yield f"{block}.gate.weight", torch.randn(EXPERTS, hidden, generator=generator)
            yield f"{block}.gate.e_score_correction_bias", torch.zeros(EXPERTS)


def upcycled_config(dense: dict[str, Any], mtp_layers: int) -> dict[str, Any]:
    """The config.json.

    Args:
        dense: the embedded model's.
        mtp_layers: that lie behind the model's own.
    """
    return {key: dense[key] for key in KEPT} | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 1.0,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP,
        "n_shared_experts": PARTS - 1,
        "moe_intermediate_size": dense["intermediate_size"] // PARTS,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": mtp_layers,
    }
