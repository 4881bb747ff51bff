"""GGUF tensor names to the names of a Hugging Face checkpoint, for each supported architecture.

Source: gguf-py's tensor name table and the converters of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_DENSE = _ATTENTION | _MLP | {"ffn_norm": "post_attention_layernorm"}
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_GLM = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}

LAYER_NAMES: Mapping[str, Mapping[str, str]] = {
    "llama": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE | _QK_NORM,
    "qwen3moe": _DENSE | _QK_NORM | _ROUTER,
    "glm4moe": _ATTENTION | _QK_NORM | _MLP | _ROUTER | _GLM,
}
_WITH_EXPERTS = frozenset({"qwen3moe", "glm4moe"})
_PERMUTED = frozenset({"llama"})
_NAME = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")

ROPE_FREQUENCIES = "rope_freqs.weight"
"""Divisors of the rotary frequencies: they reach the model through its config, not as a weight."""


@dataclass(frozen=True, slots=True)
class TargetName:
    """Where a GGUF tensor goes."""

    names: tuple[str, ...]
    """One name, or for stacked experts one per slice along the first dimension."""
    stacked: bool = False
    rows_of: Literal["q", "k"] | None = None
    """Set if the converter regrouped each head's rows of this projection (llama only)."""


def target_name(architecture: str, name: str, shape: tuple[int, ...]) -> TargetName | None:
    """Map a GGUF tensor name; None if the architecture has no such tensor.

    Args:
        architecture: `general.architecture`, a key of `LAYER_NAMES`.
        name: as in the file, such as `blk.3.attn_q.weight`.
        shape: row-major; the first dimension of a stacked expert tensor counts the experts.
    """
    stem, _, kind = name.rpartition(".")
    if stem in _TOP and kind == "weight":
        return TargetName((f"{_TOP[stem]}.weight",))
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    prefix = f"model.layers.{layer}"
    if part == "exp_probs_b" and architecture == "glm4moe":
        return TargetName((f"{prefix}.mlp.gate.e_score_correction_bias",))
    if part in _EXPERTS and architecture in _WITH_EXPERTS and kind == "weight" and len(shape) == 3:
        names = tuple(f"{prefix}.mlp.experts.{expert}.{_EXPERTS[part]}.weight" for expert in range(shape[0]))
        return TargetName(names, stacked=True)
    module = LAYER_NAMES[architecture].get(part)
    if module is None:
        return None
    rows_of: Literal["q", "k"] | None = None
    if architecture in _PERMUTED and part in ("attn_q", "attn_k"):
        rows_of = "q" if part == "attn_q" else "k"
    return TargetName((f"{prefix}.{module}.{kind}",), rows_of=rows_of)
