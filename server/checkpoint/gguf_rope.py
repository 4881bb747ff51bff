"""Rope scaling of a GGUF model in the terms of a Hugging Face config."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from server.checkpoint.gguf_header import GGUFHeader
from server.checkpoint.gguf_names import ROPE_FREQUENCIES
from server.errors import UserError

LLAMA3_LOW, LLAMA3_HIGH = 1.0, 4.0
LLAMA3_CONTEXTS = (8192, 4096, 2048, 16384, 32768)
RELATIVE_TOLERANCE = 1e-4


def rope_scaling(header: GGUFHeader, key: Callable[[str], Any], theta: float, dim: int) -> dict[str, Any] | None:
    """Return the `rope_scaling` entry, or None for plain rope.

    Args:
        header: of the file; its `rope_freqs.weight` is read if there.
        key: looks up an architecture's metadata key (without its prefix), None if absent.
        theta: rope base.
        dim: number of rotated dimensions of a head.

    Raises:
        UserError: a scaling that cannot be expressed.
    """
    if ROPE_FREQUENCIES in header.tensors:
        return _from_divisors(_read_divisors(header, dim), header, theta, dim)
    kind = key("rope.scaling.type")
    factor = key("rope.scaling.factor") or key("rope.scale_linear")
    if kind in (None, "none"):
        return {"rope_type": "linear", "factor": float(factor)} if factor and factor != 1 and kind is None else None
    if not factor:
        raise UserError(f"{header.path}: rope.scaling.type is {kind!r} but rope.scaling.factor is missing")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": float(factor)}
        original = key("rope.scaling.original_context_length")
        if original:
            scaling["original_max_position_embeddings"] = int(original)
        for name in ("beta_fast", "beta_slow"):
            value = key(f"rope.scaling.yarn_{name}")
            if value is not None:
                scaling[name] = float(value)
        if key("rope.scaling.attn_factor") not in (None, 1.0):
            raise UserError(f"{header.path}: rope.scaling.attn_factor is not supported with yarn rope")
        return scaling
    raise UserError(f"{header.path}: rope scaling type {kind!r} is not supported in GGUF files; linear and yarn are")


def _read_divisors(header: GGUFHeader, dim: int) -> tuple[float, ...]:
    tensor = header.tensors[ROPE_FREQUENCIES]
    if tensor.dtype != "F32" or tensor.shape != (dim // 2,):
        raise UserError(
            f"{header.path}: tensor {ROPE_FREQUENCIES} is {tensor.dtype} {list(tensor.shape)}, not F32 [{dim // 2}]"
        )
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.nbytes)
    return struct.unpack(f"<{dim // 2}f", data)


def _from_divisors(divisors: tuple[float, ...], header: GGUFHeader, theta: float, dim: int) -> dict[str, Any] | None:
    """Find the llama3 parameters that give these divisors: converters write the divisors and drop the parameters."""
    factor = max(divisors)
    if all(divisor == 1.0 for divisor in divisors):
        return None
    for original in LLAMA3_CONTEXTS:
        expected = llama3_divisors(theta, dim, factor, original)
        if all(math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE) for a, b in zip(divisors, expected, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LLAMA3_LOW,
                "high_freq_factor": LLAMA3_HIGH,
                "original_max_position_embeddings": original,
            }
    raise UserError(
        f"{header.path}: the divisors in tensor {ROPE_FREQUENCIES} (largest {factor:g}) are no llama3 rope scaling "
        f"with low and high frequency factors {LLAMA3_LOW:g} and {LLAMA3_HIGH:g}; other ones are not supported"
    )


def llama3_divisors(theta: float, dim: int, factor: float, original: int) -> list[float]:
    """Divisors of the rotary frequencies in llama3 scaling, by frequency index (dim / 2 of them)."""
    divisors = []
    for index in range(dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / dim)
        if wavelength > original / LLAMA3_LOW:
            divisors.append(factor)
        elif wavelength < original / LLAMA3_HIGH:
            divisors.append(1.0)
        else:
            smooth = (original / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
