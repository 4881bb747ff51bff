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

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


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

    def check(self) -> None:
        """Check that the tensor holds plain floating-point numbers.

        Raises:
            UserError: it does not: it is quantised, or holds integers.
        """
        if self.header.dtype not in _DTYPES:
            raise UserError(
                f"{self.file}: tensor {self.file_name} is stored as {self.header.dtype}; unquantised weights "
                f"({', '.join(_DTYPES)}) are supported"
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
