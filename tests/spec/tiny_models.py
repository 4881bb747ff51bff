"""Tiny random models as folders, each the same for the same seed: targets, and drafts made from them.

All have a byte-level BPE tokenizer without merges, so a token is a byte: V = 260.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

VOCAB_SIZE = 260
EOS = "<|im_end|>"
SPECIALS = ("<|bos|>", "<|im_start|>", EOS, "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
}
LLAMA = BASE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
QWEN3 = BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
GLM4_MOE = BASE | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 1,
}


class Random:
    """Weights large enough that every part shows in the logits, and greedy answers wander through the vocabulary."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self._generator) * scale

    def linear(self, rows: int, columns: int, scale: float = 1.5) -> Tensor:
        return self.normal(rows, columns, scale=scale / columns**0.5)

    def norm(self, size: int) -> Tensor:
        return 1 + self.normal(size, scale=0.3)

    def bias(self, size: int) -> Tensor:
        return self.normal(size, scale=0.3)


def attention(random: Random, config: Mapping[str, Any], *, inputs: int | None = None) -> dict[str, Tensor]:
    """Tensors of `self_attn`, by their names in it."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    rows = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    rows["v_proj"] = rows["k_proj"]
    tensors = {"o_proj.weight": random.linear(hidden, rows["q_proj"] * head_dim)}
    for name, heads in rows.items():
        tensors[f"{name}.weight"] = random.linear(heads * head_dim, inputs or hidden)
        if config.get("attention_bias"):
            tensors[f"{name}.bias"] = random.bias(heads * head_dim)
    if config.get("attention_bias") and config["model_type"] != "glm4_moe":
        tensors["o_proj.bias"] = random.bias(hidden)
    if config["model_type"].startswith("qwen3") or config.get("use_qk_norm"):
        tensors |= {f"{name}.weight": random.norm(head_dim) for name in ("q_norm", "k_norm")}
    return tensors


def mlp(random: Random, hidden: int, width: int) -> dict[str, Tensor]:
    """Tensors of a dense `mlp`, by their names in it."""
    tensors = {f"{name}.weight": random.linear(width, hidden) for name in ("gate_proj", "up_proj")}
    return tensors | {"down_proj.weight": random.linear(hidden, width)}


def experts(random: Random, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of an `mlp` with experts, by their names in it."""
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    count = config.get("n_routed_experts") or config["num_experts"]
    tensors = {"gate.weight": random.linear(count, hidden)}
    for i in range(count):
        tensors |= within(f"experts.{i}", mlp(random, hidden, width))
    if config["model_type"] == "glm4_moe":
        tensors["gate.e_score_correction_bias"] = random.bias(count)
        if config["n_shared_experts"]:
            tensors |= within("shared_experts", mlp(random, hidden, width * config["n_shared_experts"]))
    return tensors


def decoder_layer(
    random: Random, config: Mapping[str, Any], *, sparse: bool, inputs: int | None = None
) -> dict[str, Tensor]:
    """Tensors of one decoder layer, by their names in it."""
    hidden = config["hidden_size"]
    block = experts(random, config) if sparse else mlp(random, hidden, config["intermediate_size"])
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    return {
        **within("self_attn", attention(random, config, inputs=inputs)),
        **within("mlp", block),
        **{name: random.norm(hidden) for name in norms},
    }


def mtp_layer(random: Random, config: Mapping[str, Any], *, ends: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Tensors of one MTP layer; `ends` are the embedding and head that it copies, if it does."""
    hidden = config["hidden_size"]
    tensors = decoder_layer(random, config, sparse=True)
    tensors |= {f"{name}.weight": random.norm(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors["eh_proj.weight"] = random.linear(hidden, 2 * hidden)
    if ends is not None:
        tensors["embed_tokens.weight"] = ends["model.embed_tokens.weight"].clone()
        tensors["shared_head.head.weight"] = ends["lm_head.weight"].clone()
    return tensors


def within(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under a longer name."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def write_llama(folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """A dense Llama; `options` are keys of config.json."""
    return write_target(folder, LLAMA | options, seed=seed)


def write_qwen3(folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """A dense Qwen3."""
    return write_target(folder, QWEN3 | options, seed=seed)


def write_qwen3_moe(folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """A Qwen3 with experts in all layers."""
    return write_target(folder, QWEN3_MOE | options, seed=seed)


def write_glm4_moe(folder: Path, *, seed: int = 0, mtp_ends: bool = True, **options: Any) -> Path:
    """A GLM-4.5 with experts and `num_nextn_predict_layers` MTP layers, which may copy the embedding and the head."""
    return write_target(folder, GLM4_MOE | options, seed=seed, mtp_ends=mtp_ends)


def write_target(folder: Path, config: Mapping[str, Any], *, seed: int = 0, mtp_ends: bool = True) -> Path:
    """A model of any of the families above; an untied head, or none when the config ties it."""
    random = Random(seed)
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    tensors = {
        "model.embed_tokens.weight": random.normal(config["vocab_size"], hidden),
        "model.norm.weight": random.norm(hidden),
        "lm_head.weight": random.normal(config["vocab_size"], hidden, scale=0.4),
    }
    dense = config.get("first_k_dense_replace", 0) if config["model_type"].endswith("moe") else layers
    for index in range(layers):
        tensors |= within(f"model.layers.{index}", decoder_layer(random, config, sparse=index >= dense))
    for index in range(layers, layers + config.get("num_nextn_predict_layers", 0)):
        layer = mtp_layer(random, config, ends=tensors if mtp_ends else None)
        tensors |= within(f"model.layers.{index}", layer)
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    return write_folder(folder, config | {"eos_token_id": tiny_tokenizer().token_to_id(EOS)}, tensors)


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """config.json, model.safetensors and the tokenizer."""
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(config)))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    texts = {"eos_token": EOS, "chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    return folder


def tiny_tokenizer() -> Tokenizer:
    """A token for each byte, and four special ones behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def self_draft(target: Path, folder: Path) -> Path:
    """A copy: as a draft model it is always right."""
    shutil.copytree(target, folder)
    return folder


def noisy_copy(target: Path, folder: Path, noise: float = 0.1, seed: int = 1) -> Path:
    """The target with noise on its weights, `noise` times each matrix's own spread: right in part."""
    random = Random(seed)

    def disturb(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() < 2:
            return tensor
        return tensor + random.normal(*tensor.shape, scale=noise * float(tensor.std())).to(tensor.dtype)

    return changed_copy(target, folder, disturb)


def changed_copy(target: Path, folder: Path, change: Callable[[str, Tensor], Tensor | None]) -> Path:
    """A copy with each tensor changed, or left out where `change` gives None."""
    self_draft(target, folder)
    tensors = {name: change(name, tensor) for name, tensor in tensors_of(target).items()}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


def mtp_alone(target: Path, folder: Path, **options: Any) -> Path:
    """The target's MTP layers as a folder of their own, with the target's config."""
    config = config_of(target)
    first = config["num_hidden_layers"]
    tensors = {
        name: tensor
        for name, tensor in tensors_of(target).items()
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= first
    }
    return write_folder(folder, config | options, tensors)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder written here."""
    return load_file(folder / "model.safetensors")


def config_of(folder: Path) -> dict[str, Any]:
    """Its config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config
