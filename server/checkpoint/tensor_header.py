"""Where one tensor lies in a weight file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as the header of its file declares it; checked against the file's size, contents unread."""

    name: str
    """As written in the file."""
    file: Path
    dtype: str
    """The file format's own name: BF16, F8_E4M3 … (safetensors), Q4_1, Q6_K … (GGUF)."""
    shape: tuple[int, ...]
    """Row-major: a linear weight is (out, in)."""
    offset: int
    """Of the first byte, from the start of the file."""
    nbytes: int
