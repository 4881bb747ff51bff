"""A checkpoint's headers as they were before it was quantised: for those who read a model's shape from its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from server.checkpoint.tensor_header import TensorHeader
from server.engine.quantization.formats import BESIDE_A_WEIGHT
from server.engine.quantization.int4 import PER_WORD
from server.engine.quantization.modules import PART_OF_A_WEIGHT

_PER_BYTE = 2
"""4-bit numbers."""


def plain_headers(headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Each weight under its plain name, `module.weight`, with its logical shape; its scales are left out.

    Packed columns may be padded, so the last dimension may be a little too large.
    """
    plain: dict[str, TensorHeader] = {}
    for name, header in headers.items():
        module, dot, last = name.rpartition(".")
        packed_as_weight = last == "weight" and f"{module}.weight_scale_2" in headers
        if last == "weight_packed" or packed_as_weight:
            plain[f"{module}{dot}weight"] = replace(header, shape=_unpacked(header))
        elif last == "weight" or not (PART_OF_A_WEIGHT.fullmatch(last) or last in BESIDE_A_WEIGHT):
            plain[name] = header
    return plain


def _unpacked(header: TensorHeader) -> tuple[int, ...]:
    numbers = {"I32": PER_WORD, "U8": _PER_BYTE}.get(header.dtype, 1)
    return (*header.shape[:-1], header.shape[-1] * numbers) if header.shape else ()
