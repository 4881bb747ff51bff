"""The header of a safetensors file: a little-endian u64 length, that many bytes of JSON, then the tensors.

Checked as strictly as the format's own reader does (no holes, no overlaps, nothing behind the last tensor), so that a
file that was cut off is refused with the name of the first tensor that is not whole.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from server.checkpoint.json_files import parse_json_object
from server.checkpoint.tensor_header import TensorHeader
from server.errors import UserError

MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""

_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def read_safetensors_header(path: Path) -> dict[str, TensorHeader]:
    """Read and check the header of one safetensors file; no weight is read.

    Raises:
        UserError: unreadable, not safetensors, truncated, or a header that contradicts itself or the file's size.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise _unusable(path, f"it is only {size} bytes long")
            if length > size - 8 or length > MAX_HEADER:
                raise _unusable(path, f"it claims a header of {length} bytes, but is {size} bytes long")
            text = file.read(length)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    entries = parse_json_object(text, f"the header of {path}")
    entries.pop("__metadata__", None)
    data_start = 8 + length
    headers = [_entry(path, name, entry, data_start) for name, entry in entries.items()]
    headers.sort(key=lambda header: (header.offset, header.nbytes))
    position = data_start
    for header in headers:
        if header.offset != position:
            raise _unusable(path, f"tensor {header.name} starts at byte {header.offset}, but byte {position} is next")
        position += header.nbytes
        if position > size:
            raise _unusable(
                path, f"it is truncated: tensor {header.name} ends at byte {position}, but the file ends at byte {size}"
            )
    if position != size:
        raise _unusable(path, f"{size - position} bytes follow its last tensor")
    return {header.name: header for header in headers}


def _entry(path: Path, name: str, entry: Any, data_start: int) -> TensorHeader:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(
            isinstance(size, int) and size >= 0 for size in shape
        ):
            bits = _BITS.get(dtype)
            if bits is None:
                raise _unusable(path, f"tensor {name} has the unknown dtype {dtype!r}")
            if not 0 <= begin <= end or prod(shape) * bits != (end - begin) * 8:
                raise _unusable(
                    path, f"tensor {name} of shape {shape} ({dtype}) cannot lie between bytes {begin} and {end}"
                )
            return TensorHeader(name, path, dtype, tuple(shape), data_start + begin, end - begin)
    raise _unusable(path, f"its entry for tensor {name} is malformed")


def _unusable(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is not a usable safetensors file: {reason}")
