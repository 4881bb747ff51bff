"""Weights in a GGUF file: renamed, un-permuted, and dequantised where numbers are wanted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from server.checkpoint.gguf_header import GGUFHeader
from server.checkpoint.gguf_names import ROPE_FREQUENCIES, target_name
from server.checkpoint.gguf_types import LOADABLE_TYPES
from server.checkpoint.tensor_header import TensorHeader
from server.engine.loading.dequantize import dequantize
from server.engine.loading.mapped_file import MappedFiles
from server.errors import UserError

CHUNK_ELEMENTS = 1 << 20
"""Dequantised at a time: the float32 intermediate stays small however large the tensor is."""


@dataclass(frozen=True, slots=True)
class GGUFWeight:
    """A `WeightSource` in a GGUF file: a tensor, or one expert's slice of a stacked one."""

    name: str
    header: TensorHeader
    files: MappedFiles
    expert: int | None
    """Index into the first dimension of a stacked tensor."""
    raw: bool
    """Whether blocks are copied as they are, a row of bytes for a row of the weight, in place of the numbers."""
    heads: int | None
    """Set if each head's rows are regrouped: row 2j+p of a head is to become row p·hd/2+j."""

    @property
    def file(self) -> Path:
        """The GGUF file."""
        return self.header.file

    @property
    def file_name(self) -> str:
        """Name in the file."""
        return self.header.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major, of the slice if it is one."""
        shape = self.header.shape if self.expert is None else self.header.shape[1:]
        return (shape[0], self.nbytes // shape[0]) if self.raw and len(shape) == 2 else shape

    @property
    def nbytes(self) -> int:
        """Bytes in the file, of the slice if it is one."""
        return self.header.nbytes if self.expert is None else self.header.nbytes // self.header.shape[0]

    def check(self, target: Tensor) -> None:
        """Check that there is a formula for the tensor's type. It gives numbers for a target of any floating dtype.

        Raises:
            UserError: there is none.
        """
        if self.header.dtype not in LOADABLE_TYPES:
            raise UserError(
                f"{self.file}: tensor {self.file_name} has type {self.header.dtype}; supported types are "
                f"{', '.join(LOADABLE_TYPES)}"
            )

    def copy_to(self, target: Tensor) -> None:
        """Dequantise into `target`, some rows at a time."""
        data = self.files.bytes_of(self.header)
        if self.expert is not None:
            data = data[self.expert * self.nbytes : (self.expert + 1) * self.nbytes]
        rows = self._rows(data)
        if self.raw:
            target.copy_(rows)
            return
        columns = self.shape[-1]
        out = target.view(-1, columns)
        if rows.shape[0] != out.shape[0]:  # a one-dimensional tensor of regrouped rows
            out = target.view(rows.shape[0], -1)
        step = max(1, CHUNK_ELEMENTS // columns)
        for start in range(0, out.shape[0], step):
            part = dequantize(rows[start : start + step].reshape(-1), self.header.dtype)
            chunk = out[start : start + step]
            chunk.copy_(part.view(chunk.shape))

    def _rows(self, data: Tensor) -> Tensor:
        """View or gather the bytes as one line per row: blocks never cross rows, so rows can move unread."""
        if self.heads is not None:
            pairs = self.shape[0] // self.heads // 2
            return data.view(self.heads, pairs, 2, -1).transpose(1, 2).reshape(self.shape[0], -1)
        count = 1
        for size in self.shape[:-1]:
            count *= size
        return data.view(count, -1)


def gguf_sources(header: GGUFHeader, config: Mapping[str, Any], raw: Collection[str] = frozenset()) -> list[GGUFWeight]:
    """List all tensors in file order under their Hugging Face names, stacked experts apart.

    Args:
        header: of the file.
        config: the model's.
        raw: names whose blocks are wanted as they are.

    Raises:
        UserError: a tensor that this architecture does not have, or heads that do not divide its rows.
    """
    architecture: str = header.metadata["general.architecture"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    files = MappedFiles()
    sources = []
    for tensor in sorted(header.tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.name == ROPE_FREQUENCIES:
            continue
        target = target_name(architecture, tensor.name, tensor.shape)
        if target is None:
            raise UserError(f"{header.path}: tensor {tensor.name} is unknown in the architecture {architecture}")
        regroup = heads[target.rows_of] if target.rows_of else None
        if regroup and tensor.shape[0] % (2 * regroup):
            raise UserError(
                f"{header.path}: tensor {tensor.name} has {tensor.shape[0]} rows, which {regroup} heads cannot share"
            )
        for index, name in enumerate(target.names):
            sources.append(GGUFWeight(name, tensor, files, index if target.stacked else None, name in raw, regroup))
    return sources
