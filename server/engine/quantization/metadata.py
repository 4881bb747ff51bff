"""Find and read a checkpoint's quantisation metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.json_files import read_optional_json_object
from server.engine.quantization.compressed_tensors import read_compressed_tensors
from server.engine.quantization.declaration import Declaration
from server.engine.quantization.hf_fp8 import read_hf_fp8
from server.engine.quantization.modelopt import read_modelopt
from server.errors import UserError

METHODS: dict[str, Callable[[Mapping[str, Any], str], Declaration]] = {
    "fp8": read_hf_fp8,
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
}
"""Readers by `quant_method`."""

_KEYS = ("quantization_config", "compression_config")
_SEPARATE = "hf_quant_config.json"


def read_declaration(checkpoint: Checkpoint) -> Declaration | None:
    """The checkpoint's metadata; None when it has none.

    Raises:
        UserError: a method that is not supported, or values that cannot be understood.
    """
    found = declared_method(checkpoint.config)
    if found is not None:
        method, content, where = found
        return METHODS[method](content, where)
    if checkpoint.path.is_dir():
        separate = read_optional_json_object(checkpoint.path / _SEPARATE)
        if separate:
            return read_modelopt(separate, _SEPARATE)
    return None


def declared_method(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str] | None:
    """The method's name, the metadata and its place in a config.json; None when it holds none.

    Raises:
        UserError: a method that is not supported.
    """
    for key in _KEYS:
        content = config.get(key)
        if not content:
            continue
        where = f"config.json, {key}"
        if not isinstance(content, Mapping):
            raise UserError(f"{where} is {content!r}; it must be an object")
        # Older compressed-tensors files name no method.
        method = content.get("quant_method", "compressed-tensors" if key == "compression_config" else "unnamed")
        if method not in METHODS:
            raise UserError(
                f"{where}: quantisation method {method!r} is not supported; supported are {', '.join(METHODS)} "
                "(8-bit e4m3, 4-bit integers in groups, NVFP4) and unquantised checkpoints"
            )
        return method, content, where
    return None
