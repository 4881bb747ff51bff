"""Paged attention by Triton kernels: CUDA's default. triton is imported when a backend is chosen, not before."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from server.engine.attention.base import AttentionNeed, KernelPages, StepMetadata, Unsupported
from server.engine.attention.paged_cache import PagedCache, page_bytes

MAX_HEAD_DIM = 256
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NEEDS_CUDA = "the triton backend needs CUDA, or TRITON_INTERPRET=1 for tests on a CPU"


@dataclass(frozen=True)
class _Launch:
    """Tiles of equal shape, run by one launch."""

    tiles: Tensor
    """int32 [N, TILE_FIELDS]."""
    block_m: int
    """(query, query head) pairs a tile has room for."""
    end: int
    """Keys of the longest tile."""


@dataclass(frozen=True)
class TritonPlan:
    """The step, cut into tiles of queries."""

    slots: Tensor
    block_tables: Tensor
    launches: list[_Launch]


class TritonAttention:
    """Flash-style attention that reads keys and values in their pages."""

    name: ClassVar[str] = "triton"
    kernel_pages: ClassVar[KernelPages] = KernelPages(sizes=frozenset({16, 32, 64, 128}))
    kv_layout: ClassVar[str] = "NHD"

    @classmethod
    def supports(cls, need: AttentionNeed) -> Unsupported | None:
        """Heads of at most 256 in a floating dtype, on CUDA or in triton's interpreter."""
        if need.num_heads % need.num_kv_heads:
            return Unsupported(f"{need.num_heads} query heads are no multiple of {need.num_kv_heads} KV heads")
        if need.head_dim > MAX_HEAD_DIM:
            return Unsupported(f"head dimension {need.head_dim} (it takes up to {MAX_HEAD_DIM})")
        if need.dtype not in FLOATS:
            return Unsupported(f"queries of dtype {need.dtype} (it takes float32, float16 or bfloat16)")
        if need.kv_dtype not in FLOATS:
            return Unsupported(f"KV cache of dtype {need.kv_dtype} (it stores float32, float16 or bfloat16)")
        return _unavailable(need.device)

    def __init__(self, need: AttentionNeed, num_layers: int) -> None:
        from server.engine.attention import triton_kernels

        self.need = need
        self.num_layers = num_layers
        self.cache: PagedCache | None = None
        self._kernels = triton_kernels
        self._group = need.num_heads // need.num_kv_heads
        self._dim_padded = max(16, _power_of_two(need.head_dim))  # tl.dot takes no less than 16
        self._shapes = _tile_shapes(need, self._group)
        self._compute = _compute_type(need)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page over all layers, keys and values."""
        return page_bytes(self.need, self.num_layers, page_size)

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Make the KV cache of all layers."""
        self.cache = PagedCache(self.need, self.num_layers, num_pages, page_size)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages in all layers; see `AttentionBackend.copy_pages`."""
        if self.cache is not None:
            self.cache.copy_pages(sources, targets)

    def plan(self, step: StepMetadata) -> TritonPlan:
        """Cut each row's queries into tiles: rows that fit a small tile (decode, verify) apart from longer ones.

        Raises:
            ValueError: a row has context, but there is no cache yet.
        """
        starts = step.query_start
        tiles: dict[int, list[tuple[int, int, int, int]]] = {}
        for row, length in enumerate(step.seq_lens):
            start, new = starts[row], starts[row + 1] - starts[row]
            context = length - new
            if context and self.cache is None:
                raise ValueError(f"row {row} has {context} tokens of context before the KV cache was allocated")
            block_m = self._shapes.small if new * self._group <= self._shapes.small else self._shapes.large
            per_tile = block_m // self._group
            tiles.setdefault(block_m, []).extend(
                (row, start + i, min(per_tile, new - i), context + i) for i in range(0, new, per_tile)
            )
        device = self.need.device
        launches = []
        for block_m, own in tiles.items():
            table = np.array(own, np.int32)
            end = int((table[:, 2] + table[:, 3]).max())
            launches.append(_Launch(torch.from_numpy(table).to(device), block_m, end))
        return TritonPlan(step.slot_mapping, step.block_tables, launches)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, plan: TritonPlan) -> Tensor:
        """Store k and v, then attend; see `AttentionBackend.forward`."""
        need = self.need
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        keys, values, page_size = k, v, 0
        if self.cache is not None:
            page_size = self.cache.page_size
            keys, values = (x[layer_id].flatten(0, 1) for x in (self.cache.keys, self.cache.values))
            self._store(k, v, keys, values, plan.slots)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for launch in plan.launches:
            self._kernels.attend[(len(launch.tiles), need.num_kv_heads)](
                q,
                keys,
                values,
                out,
                launch.tiles,
                plan.block_tables,
                plan.block_tables.stride(0),
                math.log2(math.e) / math.sqrt(need.head_dim),
                *q.stride()[:2],
                *keys.stride()[:2],
                *values.stride()[:2],
                GROUP=self._group,
                HEAD_DIM=need.head_dim,
                DIM_PADDED=self._dim_padded,
                PAGE_SIZE=page_size,
                BLOCK_M=launch.block_m,
                BLOCK_N=self._shapes.keys,
                COMPUTE=self._compute,
                LONGEST=launch.end if self._kernels.INTERPRETED else 0,
            )
        return out.flatten(1)

    def _store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        need = self.need
        self._kernels.store_kv[(len(slots),)](
            k,
            v,
            keys,
            values,
            slots,
            *k.stride()[:2],
            *v.stride()[:2],
            NUM_KV_HEADS=need.num_kv_heads,
            HEADS_PADDED=_power_of_two(need.num_kv_heads),
            HEAD_DIM=need.head_dim,
            DIM_PADDED=self._dim_padded,
        )


@dataclass(frozen=True)
class _TileShapes:
    small: int
    """M of tiles for rows with few new tokens."""
    large: int
    """M of tiles for prompts."""
    keys: int
    """Keys a block."""


def _tile_shapes(need: AttentionNeed, group: int) -> _TileShapes:
    """Sizes that keep a block of keys, its values and the queries within the shared memory of sm_80 and later."""
    small = max(16, _power_of_two(group))
    head_bytes = _power_of_two(need.head_dim) * need.dtype.itemsize
    keys = 64 if head_bytes <= 256 else 32 if head_bytes <= 512 else 16
    # fp32 products run without tensor cores (TF32 is not exact): larger tiles would only spill registers.
    large = small if need.dtype == torch.float32 else max(64, small)
    return _TileShapes(small, large, keys)


def _compute_type(need: AttentionNeed) -> object:
    """The type of the products' operands, of `triton.language`; sums are always fp32."""
    import triton.language as tl

    from server.engine.attention.triton_kernels import INTERPRETED

    if need.dtype == torch.bfloat16 and INTERPRETED:
        return tl.float32  # the interpreter's bf16 product reads the bits as integers
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[need.dtype]


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _unavailable(device: torch.device) -> Unsupported | None:
    """Why triton cannot run kernels for the device in this process."""
    on_cpu = device.type == "cpu"
    if device.type != "cuda" and not (on_cpu and os.environ.get("TRITON_INTERPRET")):
        return Unsupported(NEEDS_CUDA)
    try:
        from server.engine.attention.triton_kernels import INTERPRETED
    except ImportError as error:
        return Unsupported(f"triton does not import here ({error}); install triton 3.6 or later")
    if on_cpu and not INTERPRETED:
        return Unsupported(f"{NEEDS_CUDA}, set before anything imports triton")
    return None
