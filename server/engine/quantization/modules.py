"""The modules of a checkpoint that have a weight, told from the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from server.checkpoint.tensor_header import TensorHeader
from server.checkpoint.text_config import is_nested, text_tensor_name

PART_OF_A_WEIGHT = re.compile(r"weight|weight_\w+|qweight|pre_quant_scale")
_NO_LINEAR_LAYER = re.compile(r"(.*\.)?(embed_tokens|gate|shared_expert_gate|\w*norm\w*)")

COMPUTED_TOGETHER = (
    re.compile(r"(.*\.)(?:q_proj|k_proj|v_proj)"),
    re.compile(r"(.*\.)(?:gate_proj|up_proj)"),
    re.compile(r"(.*\.experts\.)\d+\.(?:gate_proj|up_proj|down_proj)"),
)
"""Modules with the same first group have to be stored alike."""


class WeightModule(NamedTuple):
    """One module."""

    stored: str
    """Its name in the file."""
    tensors: dict[str, TensorHeader]
    """Those that make its weight, by the last part of their names."""


def weight_modules(headers: Mapping[str, TensorHeader]) -> dict[str, WeightModule]:
    """Modules with a weight of two dimensions or a quantised one, by the names they have in the text model alone."""
    nested = is_nested(headers)
    modules: dict[str, WeightModule] = {}
    for stored_tensor, header in headers.items():
        stored, _, last = stored_tensor.rpartition(".")
        if PART_OF_A_WEIGHT.fullmatch(last):
            mapped = (text_tensor_name(stored_tensor) if nested else None) or stored_tensor
            modules.setdefault(mapped.rpartition(".")[0], WeightModule(stored, {})).tensors[last] = header
    return {
        name: module
        for name, module in modules.items()
        if set(module.tensors) != {"weight"} or len(module.tensors["weight"].shape) == 2
    }


def may_be_quantized(module: str) -> bool:
    """Whether it is a linear layer: no embedding, norm or router, which are computed from plain weights only."""
    return _NO_LINEAR_LAYER.fullmatch(module) is None
