"""Metadata of `quant_method: fp8`, the format of DeepSeek's and Qwen's FP8 checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.engine.quantization.declaration import Declaration, Group
from server.engine.quantization.fp8 import Fp8
from server.engine.quantization.patterns import patterns
from server.errors import UserError


def read_hf_fp8(content: Mapping[str, Any], where: str) -> Declaration:
    """Read it.

    Raises:
        UserError: another 8-bit format than e4m3, or malformed values.
    """
    kind = content.get("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise UserError(f"{where}: fmt {kind!r} is not supported; supported is e4m3")
    key = "ignored_layers" if content.get("ignored_layers") else "modules_to_not_convert"
    return Declaration(
        method="fp8",
        where=where,
        ignored=patterns(content.get(key), "tree", f"{where}, {key}"),
        ignored_key=key,
        groups=(Group("weight_block_size", None, _format(content.get("weight_block_size"), where)),),
    )


def _format(block: object, where: str) -> Fp8:
    if block is None:
        return Fp8("tensor", "weight_scale", 1)
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Fp8("block", "weight_scale_inv", 2, (rows, columns))
    raise UserError(f"{where}: weight_block_size is {block!r}; it must be two positive whole numbers or null")
