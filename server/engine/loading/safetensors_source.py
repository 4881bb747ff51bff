"""Weights in safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from server.checkpoint.tensor_header import TensorHeader
from server.checkpoint.text_config import is_nested, text_tensor_name
from server.engine.loading.mapped_file import MappedFiles
from server.errors import UserError

_NUMBERS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Converted to the target's dtype. The last one is a format of scales."""
_CODES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Parts of quantised weights: kept as they are."""
_DTYPES = _NUMBERS | _CODES
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class SafetensorsWeight:
    """A `WeightSource` in a safetensors file."""

    name: str
    header: TensorHeader
    files: MappedFiles

    @property
    def file(self) -> Path:
        """The shard."""
        return self.header.file

    @property
    def file_name(self) -> str:
        """Name in the shard."""
        return self.header.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major."""
        return self.header.shape

    @property
    def nbytes(self) -> int:
        """Bytes in the shard."""
        return self.header.nbytes

    def check(self, target: Tensor) -> None:
        """Check that the tensor holds floating-point numbers where they are wanted, else exactly the target's dtype.

        Raises:
            UserError: it does not, such as quantised codes that would be taken for numbers.
        """
        kinds = _NUMBERS if target.dtype in _PLAIN else {k: v for k, v in _CODES.items() if v is target.dtype}
        if self.header.dtype not in kinds:
            raise UserError(
                f"{self.file}: tensor {self.file_name} is stored as {self.header.dtype}; the model reads it from "
                f"{', '.join(kinds)}"
            )

    def copy_to(self, target: Tensor) -> None:
        """Copy from the mapped file, converting between floating dtypes."""
        data = self.files.bytes_of(self.header)
        target.copy_(data.view(_DTYPES[self.header.dtype]).view(self.shape))


def safetensors_sources(headers: Mapping[str, TensorHeader]) -> list[SafetensorsWeight]:
    """List the text model's tensors in file order, which is the order to read them in."""
    nested = is_nested(headers)
    files = MappedFiles()
    ordered = sorted(headers.values(), key=lambda header: (header.file, header.offset))
    named = ((text_tensor_name(header.name) if nested else header.name, header) for header in ordered)
    return [SafetensorsWeight(name, header, files) for name, header in named if name is not None]
