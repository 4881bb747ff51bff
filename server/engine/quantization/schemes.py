"""Schemes by name, and the metadata that says them in a config.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from server.engine.quantization.format import QuantizedFormat
from server.engine.quantization.fp8 import BLOCK, Fp8
from server.engine.quantization.int4 import Int4
from server.engine.quantization.modelopt import ALGORITHMS, MIXED
from server.engine.quantization.nvfp4 import GROUP, Nvfp4
from server.errors import UserError

Layout = Literal["compressed-tensors", "fp8", "modelopt"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
SCHEMES = "fp8_tensor, fp8_channel, fp8_block, int4_channel, int4_gN with N columns to a group (+ _asym), nvfp4"

_INT4 = re.compile(r"int4_(?:g([1-9]\d*)|channel)(_asym)?")
_HF_FP8: dict[str, QuantizedFormat] = {
    "fp8_tensor": Fp8("tensor", "weight_scale", 1),
    "fp8_block": Fp8("block", "weight_scale_inv"),
}
_COMPRESSED_TENSORS: dict[str, QuantizedFormat] = {
    "fp8_tensor": Fp8("tensor", scale_dims=1),
    "fp8_channel": Fp8("channel"),
    "fp8_block": Fp8("block"),
    "nvfp4": Nvfp4("compressed-tensors"),
}
_MODELOPT = {
    "fp8_tensor": "FP8",
    "fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8_block": "FP8_PB_WO",
    "nvfp4": "NVFP4",
}


def scheme_format(label: str, layout: Layout) -> QuantizedFormat:
    """The format of a scheme, which is its label, in a layout.

    Raises:
        UserError: no such scheme, or not in this layout.
    """
    int4 = _INT4.fullmatch(label)
    found: QuantizedFormat | None = None
    if layout == "modelopt":
        algorithm = ALGORITHMS.get(_MODELOPT.get(label, ""))
        found = algorithm if isinstance(algorithm, Fp8 | Nvfp4) else None
    elif layout == "compressed-tensors" and int4:
        found = Int4(int(int4[1]) if int4[1] else None, not int4[2])
    else:
        found = (_COMPRESSED_TENSORS if layout == "compressed-tensors" else _HF_FP8).get(label)
    if found is None:
        raise UserError(f"scheme {label!r} does not exist in the layout {layout}; schemes are {SCHEMES}")
    return found


@dataclass(frozen=True)
class Scheme:
    """Modules and their format, for metadata."""

    format: QuantizedFormat
    pattern: str | None
    """As compressed-tensors writes targets; None means all that no other scheme takes."""
    modules: Sequence[str]
    """Those that it took."""


def metadata(schemes: Sequence[Scheme], ignored: Sequence[str], layout: Layout) -> dict[str, Any]:
    """`quantization_config` for a config.json. The layout fp8 has room for one scheme only."""
    if layout == "fp8":
        block = next(
            (list(s.format.block) for s in schemes if isinstance(s.format, Fp8) and "block" in s.format.label), None
        )
        base = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return base | {"weight_block_size": block, "modules_to_not_convert": list(ignored)}
    if layout == "modelopt":
        names = {ALGORITHMS[name]: name for name in reversed(ALGORITHMS)}
        content: dict[str, Any] = {
            "quant_method": "modelopt",
            "producer": {"name": "modelopt"},
            "ignore": list(ignored),
        }
        if len(schemes) == 1 and schemes[0].pattern is None:
            return content | {"quant_algo": names[schemes[0].format]}
        layers = {module: {"quant_algo": names[scheme.format]} for scheme in schemes for module in scheme.modules}
        return content | {"quant_algo": MIXED, "quantized_layers": layers}
    groups = {f"group_{index}": _group(scheme) for index, scheme in enumerate(schemes)}
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": list(ignored),
    }


def _group(scheme: Scheme) -> dict[str, Any]:
    format = scheme.format
    weights: dict[str, Any]
    if isinstance(format, Fp8):
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": format.granularity}
        if format.granularity == "block":
            weights["block_structure"] = list(BLOCK)
        name = "float-quantized"
    elif isinstance(format, Int4):
        weights = {"num_bits": 4, "type": "int", "symmetric": format.symmetric}
        weights |= {"strategy": "group" if format.group_size else "channel", "group_size": format.group_size}
        name = "pack-quantized"
    else:
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": GROUP}
        name = "nvfp4-pack-quantized"
    return {"targets": [scheme.pattern or "Linear"], "weights": weights, "input_activations": None, "format": name}
