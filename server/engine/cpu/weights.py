"""Weights in the layout that the C products read: tiles of 16 rows, blocks of 32 columns (see source/weights.h)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from server.engine.cpu.library import CWeight, load_library

LANES = 16
BLOCK = 32
"""Columns of a scale."""

Bits = Literal[4, 8, 16]


@dataclass(frozen=True)
class PackedWeight:
    """One weight, and its products."""

    data: Tensor
    """uint8, tile after tile."""
    bits: Bits
    rows: int
    columns: int
    bias: Tensor | None = field(default=None)
    """float32 [rows, rounded up to 16]."""

    @cached_property
    def described(self) -> CWeight:
        """For C; valid as long as this object is."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return CWeight(self.data.data_ptr(), bias, self.bits, self.rows, self.columns)

    def product(self, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """X @ weight.T + bias: bfloat16 [T, columns] -> [T, rows] in bfloat16 or float32."""
        library = load_library()
        x = _rows(x)
        out = torch.empty(len(x), self.rows, dtype=dtype)
        room = torch.empty(library.product_room(len(x), self.columns), dtype=torch.uint8)
        rounded = int(dtype is torch.bfloat16)
        library.product(
            self.described, x.data_ptr(), x.stride(0), len(x), out.data_ptr(), rounded, room.data_ptr(), _threads()
        )
        return out

    def best(self, x: Tensor, limit: int) -> Tensor:
        """The row, of the first `limit`, with the largest product; of equals the first: [T, columns] -> int64 [T]."""
        library = load_library()
        x = _rows(x)
        out = torch.full((len(x),), -1)
        room = torch.empty(library.product_room(len(x), self.columns), dtype=torch.uint8)
        limit = min(limit, self.rows)
        library.best(
            self.described, x.data_ptr(), x.stride(0), len(x), limit, out.data_ptr(), room.data_ptr(), _threads()
        )
        return out


def pack_four_bits(codes: Tensor, scales: Tensor, minimums: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """W = code * scale + minimum, by blocks of 32 columns.

    Args:
        codes: uint8 [rows, columns] of 0 to 15.
        scales: [rows, columns / 32], kept as float16.
        minimums: the same.
        bias: [rows], any dtype.
    """
    rows, columns = codes.shape
    quads = _tiles(codes).view(-1, LANES, columns // BLOCK, 8, 4).permute(0, 2, 3, 1, 4)
    both = (quads[:, :, :4] | (quads[:, :, 4:] << 4)).flatten(2)
    data = torch.cat((both, _half_bytes(scales), _half_bytes(minimums)), -1)
    return PackedWeight(data, 4, rows, columns, _bias(bias))


def pack_eight_bits(codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """W = code * scale, by blocks of 32 columns.

    Args:
        codes: int8 [rows, columns].
        scales: [rows, columns / 32], kept as float16.
        bias: [rows], any dtype.
    """
    rows, columns = codes.shape
    shifted = codes.view(torch.uint8) ^ 0x80
    quads = _tiles(shifted).view(-1, LANES, columns // BLOCK, 8, 4).permute(0, 2, 3, 1, 4).flatten(2)
    return PackedWeight(torch.cat((quads, _half_bytes(scales)), -1), 8, rows, columns, _bias(bias))


def pack_sixteen_bits(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """Plain numbers: bfloat16 [rows, columns]; columns are a multiple of 32."""
    rows, columns = weight.shape
    pairs = _tiles(weight.view(torch.int16)).view(-1, LANES, columns // 2, 2).transpose(1, 2).contiguous()
    return PackedWeight(pairs.view(torch.uint8), 16, rows, columns, _bias(bias))


def _tiles(values: Tensor) -> Tensor:
    """Rows filled up to whole tiles."""
    return F.pad(values, (0, 0, 0, -len(values) % LANES)).contiguous()


def _half_bytes(values: Tensor) -> Tensor:
    """[rows, blocks] -> uint8 [tiles, blocks, 32]."""
    halves = _tiles(values.to(torch.float16)).view(-1, LANES, values.shape[1]).transpose(1, 2).contiguous()
    return halves.view(torch.uint8)


def _bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else F.pad(bias.float(), (0, -len(bias) % LANES)).contiguous()


def _rows(x: Tensor) -> Tensor:
    if x.dtype is not torch.bfloat16:
        raise TypeError(f"packed weights multiply bfloat16, not {x.dtype}")
    return x if x.stride(-1) == 1 and x.dim() == 2 else x.contiguous()


def _threads() -> int:
    return torch.get_num_threads()
