"""The override matrix as data: what a draft's key does in each of its states, whatever the proposer.

Each line: the target's setting, the draft's, and what has to come of it, to be checked against the contract: the three
labels of the row that users see, and what the draft's built layers hold. `UNSET` leaves a key out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

UNSET = object()


class Told(NamedTuple):
    """A row's labels."""

    requested: str
    resolved: str
    source: str


@dataclass(frozen=True)
class Override:
    """One line. The target's own row and layers never depend on it; the tests compare them with a lone target's."""

    key: str
    draft: Any
    told: Told
    target: Any = UNSET
    """The target's setting of the same name."""
    component: str = ""
    """Of the row; the key's name unless given."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further settings of the target."""

    @property
    def row(self) -> str:
        return self.component or self.key

    @property
    def speculative(self) -> dict[str, Any]:
        return {} if self.draft is UNSET else {self.key: self.draft}

    @property
    def settings(self) -> dict[str, Any]:
        return self.more | ({} if self.target is UNSET else {self.key: self.target})

    def __str__(self) -> str:
        said = ["unset" if value is UNSET else str(value) for value in (self.target, self.draft)]
        return f"{self.key}: target {said[0]}, draft {said[1]}"


def moe(target: Any, draft: Any, *told: str) -> Override:
    return Override("moe_backend", draft, Told(*told), target, "moe")


def attention(target: Any, draft: Any, *told: str) -> Override:
    return Override("attention_backend", draft, Told(*told), target, "attention")


def kv(target: Any, draft: Any, *told: str) -> Override:
    return Override("kv_cache_dtype", draft, Told(*told), target)


def load(target: Any, draft: Any, *told: str) -> Override:
    return Override("load_format", draft, Told(*told), target)


BUILT = [
    # Unset inherits the target's request; auto goes by the draft's own weights, here plain ones.
    moe(UNSET, UNSET, "unset", "grouped_mm", "auto"),
    moe("auto", UNSET, "unset", "grouped_mm", "auto"),
    moe("torch", UNSET, "unset", "torch", "inherited"),
    moe("grouped_mm", UNSET, "unset", "grouped_mm", "inherited"),
    moe("torch", "auto", "auto", "grouped_mm", "auto"),
    moe("torch", "grouped_mm", "grouped_mm", "grouped_mm", "explicit"),
    moe("grouped_mm", "torch", "torch", "torch", "explicit"),
    moe(UNSET, "Torch", "torch", "torch", "explicit"),
    # Never inherited.
    attention(UNSET, UNSET, "unset", "torch", "auto"),
    attention("triton", UNSET, "unset", "torch", "auto"),
    attention("triton", "auto", "auto", "torch", "auto"),
    attention("triton", "torch", "torch", "torch", "explicit"),
    attention("torch", "triton", "triton", "triton", "explicit"),
    attention(UNSET, "TRITON_ATTN", "triton", "triton", "explicit"),
    # Unset inherits; auto is the draft's own dtype, which is the target's: float32.
    kv(UNSET, UNSET, "unset", "float32", "auto"),
    kv("auto", UNSET, "unset", "float32", "auto"),
    kv("bfloat16", UNSET, "unset", "bfloat16", "inherited"),
    kv("bfloat16", "auto", "auto", "float32", "auto"),
    kv("bfloat16", "float32", "float32", "float32", "explicit"),
    kv(UNSET, "bf16", "bfloat16", "bfloat16", "explicit"),
    kv("float32", "float16", "float16", "float16", "explicit"),
    kv("fp8", UNSET, "unset", "float8_e4m3fn", "inherited"),
    kv("fp8_e4m3", "auto", "auto", "float32", "auto"),
    kv(UNSET, "FP8", "fp8", "float8_e4m3fn", "explicit"),
    # Unset inherits; auto is what the draft's files are.
    load(UNSET, UNSET, "unset", "safetensors", "auto"),
    load("safetensors", UNSET, "unset", "safetensors", "inherited"),
    load("dummy", UNSET, "unset", "dummy", "inherited"),
    load("dummy", "auto", "auto", "safetensors", "auto"),
    load("dummy", "safetensors", "safetensors", "safetensors", "explicit"),
    load("safetensors", "dummy", "dummy", "dummy", "explicit"),
    load(UNSET, "dummy", "dummy", "dummy", "explicit"),
    # The checkpoint's own word; named ones are in test_overrides_quantization.py.
    Override("quantization", UNSET, Told("unset", "none", "auto")),
    Override("quantization", "auto", Told("auto", "none", "auto")),
    Override("quantization", "none", Told("none", "none", "explicit")),
    Override("tensor_parallel_size", UNSET, Told("unset", "1", "inherited")),
    Override("tensor_parallel_size", 1, Told("1", "1", "explicit")),
    Override("tensor_parallel_size", 1, Told("1", "1", "explicit"), 1),
]
"""Keys that decide how the draft's layers are built."""

DRAFTING = [
    Override("num_speculative_tokens", 1, Told("1", "1", "explicit")),
    Override("num_speculative_tokens", 16, Told("16", "16", "explicit")),
    Override("adaptive_k", UNSET, Told("unset", "true", "auto")),
    Override("adaptive_k", "auto", Told("unset", "true", "auto")),
    Override("adaptive_k", True, Told("true", "true", "explicit")),
    Override("adaptive_k", False, Told("false", "false", "explicit")),
    Override("rejection_sample_method", UNSET, Told("unset", "standard", "auto")),
    Override("rejection_sample_method", "Standard", Told("standard", "standard", "explicit")),
    Override(
        "num_speculative_tokens_per_batch_size",
        [[1, 2, 1], [3, 64, 0]],
        Told("[[1, 2, 1], [3, 64, 0]]", "[[1, 2, 1], [3, 64, 0]]", "explicit"),
    ),
]
"""Keys of every method, ngram too."""

NEURAL_DRAFTING = [
    Override("max_model_len", UNSET, Told("unset", "2048", "auto")),
    Override("max_model_len", UNSET, Told("unset", "64", "auto"), 64),
    Override("max_model_len", 24, Told("24", "24", "explicit")),
    Override("max_model_len", 1000, Told("1000", "64", "explicit"), 64),
    Override("draft_sample_method", UNSET, Told("unset", "greedy", "auto")),
    Override("draft_sample_method", "greedy", Told("greedy", "greedy", "explicit")),
    Override("draft_sample_method", "Probabilistic", Told("probabilistic", "probabilistic", "explicit")),
    Override("ignore_patterns", ["original/*"], Told("original/*", "original/*", "explicit")),
]
"""Keys of the methods with a draft model."""

LOOKUP = [
    Override("prompt_lookup_min", UNSET, Told("unset", "2", "auto")),
    Override("prompt_lookup_min", 1, Told("1", "1", "explicit")),
    Override("prompt_lookup_max", UNSET, Told("unset", "5", "auto")),
    Override("prompt_lookup_max", 3, Told("3", "3", "explicit")),
]
"""Keys of ngram."""

AUX = [
    Override("aux_hidden_state_layers", UNSET, Told("unset", "[0, 1, 2]", "auto")),
    Override("aux_hidden_state_layers", [1, 2, 3], Told("[1, 2, 3]", "[1, 2, 3]", "explicit")),
]
"""Keys of eagle3."""

OWN_K = {"ngram": "5", "draft_model": "3", "eagle3": "3", "mtp": "1", "mtp_own": "1"}
"""`num_speculative_tokens` unset: MTP layers say how many they are, the other drafts here say nothing."""
