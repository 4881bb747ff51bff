"""Metadata of `quant_method: compressed-tensors`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.engine.quantization.declaration import Declaration, Group, Refused
from server.engine.quantization.format import WeightFormat
from server.engine.quantization.fp8 import BLOCK, Fp8
from server.engine.quantization.int4 import Int4
from server.engine.quantization.nvfp4 import GROUP, Nvfp4
from server.engine.quantization.patterns import patterns
from server.errors import UserError

EVERY_LINEAR = "Linear"


def read_compressed_tensors(content: Mapping[str, Any], where: str) -> Declaration:
    """Read it. Schemes that are not supported only matter to modules that have them.

    Raises:
        UserError: malformed values, or options that change every module's arithmetic.
    """
    for key in ("transform_config", "sparsity_config"):
        option = content.get(key)
        if option and not (isinstance(option, Mapping) and option.get("format") == "dense"):
            raise UserError(f"{where}: {key} is not supported")
    groups = content.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise UserError(f"{where}: config_groups is {groups!r}; it must be an object of groups")
    return Declaration(
        method="compressed-tensors",
        where=where,
        ignored=patterns(content.get("ignore"), "exact", f"{where}, ignore"),
        ignored_key="ignore",
        groups=tuple(_group(name, group, where) for name, group in groups.items()),
    )


def _group(name: str, group: Mapping[str, Any], where: str) -> Group:
    key = f"config_groups.{name}"
    targets = patterns(group.get("targets"), "exact", f"{where}, {key}.targets")
    weights = group.get("weights")
    if weights is not None and not isinstance(weights, Mapping):
        raise UserError(f"{where}: {key}.weights is {weights!r}; it must be an object or null")
    everything = any(target.text == EVERY_LINEAR for target in targets)
    return Group(key, None if everything else targets, _format(weights or {}, f"{where}, {key}.weights"))


def _format(weights: Mapping[str, Any], where: str) -> WeightFormat | Refused:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    size = weights.get("group_size")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    match (kind, bits, strategy):
        case ("float", 8, "tensor"):
            return Fp8("tensor", scale_dims=1)
        case ("float", 8, "channel"):
            return Fp8("channel")
        case ("float", 8, "block"):
            return Fp8("block", block=_block(weights.get("block_structure"), where))
        case ("int", 4, "channel"):
            return Int4(None, _symmetric(weights, where))
        case ("int", 4, "group") if weights.get("actorder") in ("group", True):
            return Refused("activation-ordered groups (actorder: group) are not supported")
        case ("int", 4, "group"):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UserError(f"{where}: group_size is {size!r}; it must be a positive whole number")
            return Int4(size, _symmetric(weights, where))
        case ("float", 4, "tensor_group" | "group") if size == GROUP:
            return Nvfp4("compressed-tensors")
    group = f", group_size {size}" if size else ""
    return Refused(
        f"weights of type {kind}, {bits} bits, strategy {strategy}{group} are not supported; supported are float 8 "
        f"bits (tensor, channel, block), int 4 bits (group, channel) and float 4 bits in groups of {GROUP} (NVFP4)"
    )


def _symmetric(weights: Mapping[str, Any], where: str) -> bool:
    value = weights.get("symmetric", True)
    if not isinstance(value, bool):
        raise UserError(f"{where}: symmetric is {value!r}; it must be true or false")
    return value


def _block(structure: object, where: str) -> tuple[int, int]:
    match structure:
        case None:
            return BLOCK
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case str(text):
            # Older files write "128x128".
            parts = text.split("x")
            if len(parts) == 2 and all(part.isdecimal() and int(part) for part in parts):
                return int(parts[0]), int(parts[1])
    raise UserError(f"{where}: block_structure is {structure!r}; it must be two positive whole numbers")
