"""Metadata of NVIDIA's Model Optimizer: `quant_method: modelopt`, or a `hf_quant_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.engine.quantization.declaration import Declaration, Group, Refused
from server.engine.quantization.format import WeightFormat
from server.engine.quantization.fp8 import Fp8
from server.engine.quantization.nvfp4 import Nvfp4
from server.engine.quantization.patterns import patterns
from server.errors import UserError

ALGORITHMS: dict[str, WeightFormat] = {
    "FP8": Fp8("tensor", scale_dims=0),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8("channel", scale_dims=1),
    "FP8_PB_WO": Fp8("block", scale_dims=4),
    "FP8_BLOCK_SCALES": Fp8("block", scale_dims=4),
    "NVFP4": Nvfp4("modelopt", scale_dims=0),
    "W4A16_NVFP4": Nvfp4("modelopt", scale_dims=0),
}
"""By `quant_algo`."""

MIXED = "MIXED_PRECISION"


def read_modelopt(content: Mapping[str, Any], where: str) -> Declaration:
    """Read either form.

    Raises:
        UserError: no algorithm, or malformed values.
    """
    inner = content.get("quantization", content)
    if not isinstance(inner, Mapping):
        raise UserError(f"{where}: quantization is {inner!r}; it must be an object")
    key = "exclude_modules" if "exclude_modules" in inner else "ignore"
    algorithm = inner.get("quant_algo")
    layers = inner.get("quantized_layers") or {}
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        raise UserError(f"{where}: quantized_layers is {layers!r}; it must be an object of objects")
    if not isinstance(algorithm, str):
        raise UserError(f"{where}: quant_algo is {algorithm!r}; it must be one of {', '.join([*ALGORITHMS, MIXED])}")
    groups = [
        Group(f"quantized_layers.{name}", patterns([name], "tree", where), _format(layer.get("quant_algo")))
        for name, layer in layers.items()
    ]
    if algorithm != MIXED:
        groups.append(Group(f"quant_algo {algorithm}", None, _format(algorithm)))
    return Declaration(
        method="modelopt",
        where=where,
        ignored=patterns(inner.get(key), "glob", f"{where}, {key}"),
        ignored_key=key,
        groups=tuple(groups),
    )


def _format(algorithm: object) -> WeightFormat | Refused:
    found = ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    return found or Refused(f"quant_algo {algorithm!r} is not supported; supported are {', '.join(ALGORITHMS)}")
