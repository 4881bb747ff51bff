"""A Hugging Face model config made from a GGUF file's metadata and tensor headers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.checkpoint.gguf_header import GGUFHeader
from server.checkpoint.gguf_rope import rope_scaling
from server.errors import UserError

_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "glm4moe": ("Glm4MoeForCausalLM", "glm4_moe"),
}
_SIGMOID_GATING = 2


@dataclass(frozen=True)
class _Metadata:
    """Typed look-ups of `ARCHITECTURE.key`; an absent or ill-typed key is an error that names it."""

    header: GGUFHeader
    architecture: str

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._bad(key, value, "an integer (the same in all layers)")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._bad(key, value, "a number")
        return float(value)

    def _bad(self, key: str, value: Any, expected: str) -> UserError:
        path, name = self.header.path, f"{self.architecture}.{key}"
        if value is None:
            return UserError(f"{path}: metadata {name} is missing; {expected} is needed")
        return UserError(f"{path}: metadata {name} is {str(value)[:80]}, not {expected}")


def config_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """Return the keys of the `config.json` that this model would have.

    Sizes come from the metadata; whether biases, q/k norms and an own output matrix exist comes from the tensors.

    Raises:
        UserError: an architecture that is not supported, a split file, or missing or ill-typed metadata.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in _CLASSES:
        supported = ", ".join(_CLASSES)
        raise UserError(f"{header.path}: GGUF architecture {architecture!r} is not supported; supported: {supported}")
    if header.metadata.get("split.count", 1) != 1:
        raise UserError(
            f"{header.path} is one part of a split GGUF model; join the parts first (llama-gguf-split --merge)"
        )
    meta = _Metadata(header, architecture)
    config = _common(meta)
    if architecture in _FAMILY_KEYS:
        config |= _FAMILY_KEYS[architecture](meta)
    elif meta.integer("expert_count", 0):
        raise UserError(f"{header.path}: architecture {architecture!r} with experts is not supported")
    return config


def _common(meta: _Metadata) -> dict[str, Any]:
    tensors = meta.header.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{meta.header.path}: tensor token_embd.weight is missing or has no rows and columns")
    class_name, model_type = _CLASSES[meta.architecture]
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    if heads == 0 or hidden == 0:
        raise UserError(f"{meta.header.path}: embedding_length {hidden} and head_count {heads} must be at least 1")
    head_dim = meta.integer("attention.key_length", hidden // heads)
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise UserError(f"{meta.header.path}: key and value head sizes that differ are not supported")
    rotated = meta.integer("rope.dimension_count", head_dim)
    if rotated != head_dim and meta.architecture != "glm4moe":
        raise UserError(f"{meta.header.path}: rope.dimension_count {rotated} differs from the head size {head_dim}")
    theta = meta.number("rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(meta.header, meta.get, theta, rotated),
        "max_position_embeddings": meta.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "torch_dtype": _float_dtype(meta.header),
    }
    if meta.architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if meta.architecture == "glm4moe":
        config["partial_rotary_factor"] = rotated / head_dim
    for name in ("bos", "eos"):
        token_id = meta.header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            config[f"{name}_token_id"] = token_id
    return config


def _float_dtype(header: GGUFHeader) -> str:
    """The natural dtype to compute in: that of the matrices, bfloat16 if they are quantised."""
    matrices = {tensor.dtype for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(matrices), "bfloat16")


def _qwen3_moe(meta: _Metadata) -> dict[str, Any]:
    return {
        "num_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        # llama.cpp always renormalises in this architecture, whatever the metadata holds.
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _glm4_moe(meta: _Metadata) -> dict[str, Any]:
    gating = meta.integer("expert_gating_func", _SIGMOID_GATING)
    if gating != _SIGMOID_GATING:
        raise UserError(f"{meta.header.path}: expert_gating_func {gating} is not supported for glm4moe; 2 (sigmoid) is")
    next_token_layers = meta.integer("nextn_predict_layers", 0)
    layers = meta.integer("block_count") - next_token_layers
    if layers < 1:
        raise UserError(
            f"{meta.header.path}: block_count counts {next_token_layers} next-token layers and no layer beside them"
        )
    return {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": next_token_layers,
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "n_routed_experts": meta.integer("expert_count"),
        "n_shared_experts": meta.integer("expert_shared_count", 0),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(meta.header.metadata.get("glm4moe.expert_weights_norm", True)),
        "n_group": meta.integer("expert_group_count", 1),
        "topk_group": meta.integer("expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in meta.header.tensors,
    }


_FAMILY_KEYS: dict[str, Callable[[_Metadata], dict[str, Any]]] = {"qwen3moe": _qwen3_moe, "glm4moe": _glm4_moe}
