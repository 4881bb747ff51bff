"""How a module is stored, told from the headers of its tensors: dtypes, names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

from server.checkpoint.tensor_header import TensorHeader
from server.engine.quantization.format import UNQUANTIZED, WeightFormat
from server.engine.quantization.formats import Problem
from server.engine.quantization.fp8 import BLOCK, Fp8
from server.engine.quantization.int4 import PER_WORD, Int4
from server.engine.quantization.nvfp4 import Nvfp4

PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
SCALE_DTYPES = ("BF16", "F16", "F32", "F8_E8M0")

_FOREIGN = {
    "qweight": "AWQ or GPTQ, which are not supported",
    "weight_g_idx": "activation-ordered groups (actorder: group), which are not supported",
    "pre_quant_scale": "NVFP4_AWQ, which is not supported",
    "weight_blocks": "MXFP4, which is not supported",
}
"""Tensors that formats which cannot be read here bring along."""


def stored_format(tensors: Mapping[str, TensorHeader], declared: WeightFormat | None) -> WeightFormat | Problem:
    """The format of one module.

    Args:
        tensors: the module's, by the last part of their names.
        declared: what metadata says, where it says anything; decides only what headers leave open.

    Returns:
        A format of which `tensors` are names, or the reason why there is none.
    """
    for name, what in _FOREIGN.items():
        if name in tensors:
            return _problem(tensors[name], what)
    if "weight_packed" in tensors:
        return _packed(tensors, declared)
    if "weight" not in tensors:
        return _problem(next(iter(tensors.values())), "no weight that it belongs to lies beside it")
    weight = tensors["weight"]
    if weight.dtype in PLAIN_DTYPES:
        scale = next((tensors[name] for name in tensors if name.startswith("weight_")), None)
        return _problem(scale, f"its weight is not quantised (stored as {weight.dtype})") if scale else UNQUANTIZED
    if weight.dtype == "F8_E4M3":
        return _fp8(weight, tensors, declared)
    if weight.dtype == "U8" and "weight_scale_2" in tensors:
        return _nvfp4(tensors, Nvfp4("modelopt", min(len(tensors["weight_scale_2"].shape), 1)))
    return _problem(weight, f"stored as {weight.dtype} beside {_beside(tensors)}, which is not a supported format")


def _packed(tensors: Mapping[str, TensorHeader], declared: WeightFormat | None) -> WeightFormat | Problem:
    packed, scale = tensors["weight_packed"], tensors.get("weight_scale")
    if scale is None:
        return _problem(packed, "weight_scale is missing beside it")
    if packed.dtype == "U8" and "weight_global_scale" in tensors:
        return _nvfp4(tensors, Nvfp4("compressed-tensors", min(len(tensors["weight_global_scale"].shape), 1)))
    if packed.dtype == "U8" and scale.dtype == "U8":
        return _problem(packed, "MXFP4, which is not supported")
    if packed.dtype != "I32" or len(packed.shape) != 2 or len(scale.shape) != 2:
        return _problem(packed, f"stored as {packed.dtype} {list(packed.shape)} with a scale {list(scale.shape)}")
    if not isinstance(declared, Int4):
        return _problem(packed, "no metadata says how many bits and columns to a group its words hold")
    symmetric = "weight_zero_point" not in tensors
    format = Int4(declared.group_size, symmetric)
    least, most = (packed.shape[1] - 1) * PER_WORD + 1, packed.shape[1] * PER_WORD
    if not format.groups(least) <= scale.shape[1] <= format.groups(most):
        return _problem(
            scale,
            f"shape {list(scale.shape)} does not fit {declared.label}, which the metadata says, at {most} columns",
        )
    return format


def _nvfp4(tensors: Mapping[str, TensorHeader], format: Nvfp4) -> WeightFormat | Problem:
    scale = tensors.get("weight_scale")
    if scale is None:
        return _problem(tensors[format.packed], "weight_scale is missing beside it")
    if scale.dtype != "F8_E4M3":
        return _problem(scale, f"stored as {scale.dtype}; NVFP4 has F8_E4M3 scales")
    return format


def _fp8(
    weight: TensorHeader, tensors: Mapping[str, TensorHeader], declared: WeightFormat | None
) -> WeightFormat | Problem:
    for name in ("weight_scale", "weight_scale_inv"):
        scale = tensors.get(name)
        if scale is None:
            continue
        if scale.dtype not in SCALE_DTYPES:
            return _problem(
                scale, f"stored as {scale.dtype}; an FP8 weight's scale is one of {', '.join(SCALE_DTYPES)}"
            )
        if len(weight.shape) != 2:
            return _problem(weight, f"shape {list(weight.shape)} has not two dimensions")
        said = declared if isinstance(declared, Fp8) else None
        block = said.block if said else BLOCK
        dims = len(scale.shape)
        # A small weight may fit several (it is one row, or one block): there the metadata's word counts if it has one,
        # else that one scale in two dimensions is more often a block's than a tensor's.
        candidates = [Fp8("block", name, dims, block), Fp8("channel", name, dims), Fp8("tensor", name, dims)]
        candidates.sort(key=lambda candidate: said is not None and candidate.granularity != said.granularity)
        fitting = [candidate for candidate in candidates if _fits(candidate, weight, scale)]
        if not fitting:
            return _problem(
                scale,
                f"shape {list(scale.shape)} fits a weight {list(weight.shape)} neither as one scale, nor as one a row, "
                f"nor as one for each block of {block[0]} x {block[1]}",
            )
        return fitting[0]
    return _problem(
        weight, f"stored as F8_E4M3, but no weight_scale or weight_scale_inv lies beside it: {_beside(tensors)}"
    )


def _fits(format: Fp8, weight: TensorHeader, scale: TensorHeader) -> bool:
    rows, columns = weight.shape
    dims = {"tensor": (0, 1, 2), "channel": (1, 2), "block": (2, 4)}[format.granularity]
    return format.scale_dims in dims and format.tensors(rows, columns)[format.scale].shape == scale.shape


def _beside(tensors: Mapping[str, TensorHeader]) -> str:
    return ", ".join(sorted(name for name in tensors if name != "weight")) or "nothing"


def _problem(tensor: TensorHeader, what: str) -> Problem:
    return Problem(f"{tensor.file}: tensor {tensor.name}: {what}")
