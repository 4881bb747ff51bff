"""What a family of models brings: how its config.json is to be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from server.engine.layers.hf_keys import Keys


@dataclass(frozen=True)
class MoEConfig:
    """The experts of the layers that have them."""

    layers: tuple[int, ...]
    """Indices of the layers with experts; the others are dense."""
    num_experts: int
    top_k: int
    intermediate_size: int
    """Width of one expert."""
    scoring: Literal["softmax", "sigmoid"]
    renormalize: bool
    """Whether the chosen experts' weights are made to sum to 1."""
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    shared_intermediate_size: int = 0
    """Width of the expert that every token passes; 0 when there is none."""


@dataclass(frozen=True)
class Options:
    """Where the families' layers differ."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoEConfig | None = None


@dataclass(frozen=True)
class Family:
    """One architecture."""

    architecture: str
    """As in `architectures`."""
    model_type: str
    defaults: Mapping[str, Any]
    """What an absent key means: the class defaults in transformers, which files written as a difference leave out.

    An explicit null is not the default.
    """
    options: Callable[[Keys], Options]


def top_k(keys: Keys, choices: int) -> int:
    """`num_experts_per_tok`.

    Raises:
        UserError: more than there are experts to choose from.
    """
    chosen = keys.integer("num_experts_per_tok")
    if chosen > choices:
        raise keys.bad("num_experts_per_tok", f"at most {choices}, the number of experts to choose from")
    return chosen
