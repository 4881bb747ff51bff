"""Tiny random models of transformers, saved and read back in the public layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from paged_steps import Paged, build, close, fill, mixed_run, prompt
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from server.engine.models.config import ModelConfig

TOLERANCE = 1e-4
BASE = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3} | {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def randomise(model: PreTrainedModel, seed: int = 0) -> None:
    """Weights large enough that every option shows in the logits: biases, norms and router corrections included."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            tensor.copy_(1 + 0.3 * noise)
        elif name.endswith("bias"):
            tensor.copy_(0.3 * noise)
        elif "embed" in name or "lm_head" in name:
            tensor.copy_(0.5 * noise)
        else:
            tensor.copy_(noise * 1.5 / max(tensor.shape[-1], 1) ** 0.5)


def oracle(config: PreTrainedConfig, folder: Path) -> tuple[PreTrainedModel, dict[str, Any], dict[str, Tensor]]:
    """The model, its config.json and its tensors as saved."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        randomise(model)
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    # A width of 0 leaves tensors without elements, which no real checkpoint holds.
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if tensor.numel()}
    return model, saved, tensors


def reference_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """fp32 [n, V]."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    assert logits.std() > 0.5  # differences of 1e-4 mean something
    return logits


def check(config: PreTrainedConfig, folder: Path, moe: str = "torch") -> Paged:
    """Compare whole prefills and mixed steps with transformers; returns a fresh cache's model for more."""
    hf, saved, tensors = oracle(config, folder)
    paged = build(ModelConfig.from_hf(saved), moe=moe)
    fill(paged.model, tensors)
    sequences = {"a": prompt(1, 37, 96), "b": prompt(2, 23, 96), "c": prompt(3, 20, 96)}
    expected = {name: reference_logits(hf, ids) for name, ids in sequences.items()}
    for name, logits in mixed_run(paged, sequences).items():
        assert close(logits, expected[name]) < TOLERANCE
    whole = paged.step({f"whole {name}": ids for name, ids in sequences.items()})
    for name in sequences:
        assert close(whole[f"whole {name}"], expected[name]) < TOLERANCE
    return paged
