"""The embedded model as a mixture of identical experts, in GLM-4.5-MoE's layout: a MoE whose right answer is known.

Top 2 of 4 experts under weights that sum to 1 and a router of chance, beside a shared expert of zeros: the dense
model's logits up to rounding.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from server.checkpoint.gguf_header import read_gguf_header
from server.checkpoint.locate import locate
from server.checkpoint.tokenizer import load_tokenizer
from server.demo.upcycled import KEPT
from server.engine.loading.gguf_source import gguf_sources

EXPERTS, TOP = 4, 2
PARTS = ("gate_proj", "up_proj", "down_proj")


def write_upcycled(folder: Path) -> Path:
    """Write it, two gigabytes in fp32."""
    folder.mkdir(parents=True)
    checkpoint = locate(None)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for source in gguf_sources(read_gguf_header(checkpoint.path), checkpoint.config):
        tensor = torch.empty(source.shape)
        source.copy_to(tensor)
        block, _, part = source.name.removesuffix(".weight").rpartition(".")
        if part not in PARTS:
            tensors[source.name] = tensor
            continue
        for expert in range(EXPERTS):
            tensors[f"{block}.experts.{expert}.{part}.weight"] = tensor.clone()
        tensors[f"{block}.shared_experts.{part}.weight"] = torch.zeros_like(tensor)
        tensors[f"{block}.gate.weight"] = torch.randn(
            EXPERTS, int(checkpoint.config["hidden_size"]), generator=generator
        )
        tensors[f"{block}.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {key: checkpoint.config[key] for key in KEPT} | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 1.0,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP,
        "n_shared_experts": 1,
        "moe_intermediate_size": checkpoint.config["intermediate_size"],
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    files = load_tokenizer(checkpoint)
    files.tokenizer.save(str(folder / "tokenizer.json"))
    texts = {**files.special_tokens, "chat_template": files.chat_templates["default"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    return folder
