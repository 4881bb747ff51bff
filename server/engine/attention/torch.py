"""The reference attention: torch's own products over gathered pages. Exact on any device, and the CPU's product."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from server.engine.attention.base import AttentionNeed, KernelPages, StepMetadata, Unsupported


@dataclass(frozen=True)
class _Prefill:
    """A row with several query tokens."""

    start: int
    end: int
    pages: Tensor | None
    """int64 [P] pages holding the row; None when the row has no context and reads its own k and v."""
    length: int
    mask: Tensor | None


@dataclass(frozen=True)
class _Decodes:
    """Rows with one query token each, padded to the longest."""

    rows: Tensor | None
    """int64 [B], their token indices; None when these are all the step's tokens in order."""
    pages: Tensor
    """int64 [B, P]."""
    mask: Tensor | None
    """bool [B, 1, 1, P * page_size]; None when every row fills its last page."""


@dataclass(frozen=True)
class TorchPlan:
    """The step, cut into rows that one product can take."""

    slots: Tensor
    prefills: list[_Prefill]
    decodes: list[_Decodes]


class TorchAttention:
    """Scaled dot-product attention of torch over gathered pages."""

    name: ClassVar[str] = "torch"
    kernel_pages: ClassVar[KernelPages] = KernelPages(multiple_of=16)
    kv_layout: ClassVar[str] = "NHD"

    @classmethod
    def supports(cls, need: AttentionNeed) -> Unsupported | None:
        """Anything that torch has arithmetic for."""
        if need.num_heads % need.num_kv_heads:
            return Unsupported(f"{need.num_heads} query heads are no multiple of {need.num_kv_heads} KV heads")
        if need.kv_dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return Unsupported(f"KV cache of dtype {need.kv_dtype} (it stores float32, float16 or bfloat16)")
        return None

    def __init__(self, need: AttentionNeed, num_layers: int) -> None:
        self.need = need
        self.num_layers = num_layers
        self.page_size = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page over all layers, keys and values."""
        need = self.need
        return 2 * self.num_layers * page_size * need.num_kv_heads * need.head_dim * need.kv_dtype.itemsize

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Two tensors a layer, [num_pages, page_size, num_kv_heads, head_dim]; zeros: padding is read, masked."""
        need = self.need
        shape = (num_pages, page_size, need.num_kv_heads, need.head_dim)
        self.page_size = page_size
        self.keys = [_zeros(shape, need) for _ in range(self.num_layers)]
        self.values = [_zeros(shape, need) for _ in range(self.num_layers)]

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages in all layers; see `AttentionBackend.copy_pages`."""
        for cache in (*self.keys, *self.values):
            cache.index_copy_(0, targets, cache.index_select(0, sources))

    def plan(self, step: StepMetadata) -> TorchPlan:
        """Sort the rows into single-token ones, batched, and longer ones, each by itself."""
        starts, lens = step.query_start, step.seq_lens
        prefills: list[_Prefill] = []
        singles: list[int] = []
        for r, length in enumerate(lens):
            start, end = starts[r], starts[r + 1]
            new = end - start
            if new == 1 and length > 1:
                singles.append(r)
                continue
            pages = None if new == length else step.block_tables[r, : -(-length // self.page_size)]
            mask = None
            if pages is not None:
                device = step.block_tables.device
                # Query i stands at position length - new + i and sees all keys up to itself.
                mask = torch.ones(new, length, dtype=torch.bool, device=device).tril_(length - new)
            prefills.append(_Prefill(start, end, pages, length, mask))
        return TorchPlan(step.slot_mapping, prefills, self._decodes(step, singles))

    def _decodes(self, step: StepMetadata, rows: list[int]) -> list[_Decodes]:
        """Rows of similar length together, so that padding at most doubles what is read."""
        buckets: dict[int, list[int]] = {}
        for r in rows:
            pages = -(-step.seq_lens[r] // self.page_size)
            buckets.setdefault(pages.bit_length(), []).append(r)
        return [self._bucket(step, bucket) for bucket in buckets.values()]

    def _bucket(self, step: StepMetadata, rows: list[int]) -> _Decodes:
        device = step.block_tables.device
        lens = [step.seq_lens[r] for r in rows]
        num_pages = -(-max(lens) // self.page_size)
        everything = len(rows) == len(step.seq_lens) == step.query_start[-1]
        tables = step.block_tables if everything else step.block_tables[torch.tensor(rows, device=device)]
        width = num_pages * self.page_size
        mask = None
        if min(lens) < width:
            mask = (torch.arange(width, device=device) < torch.tensor(lens, device=device)[:, None])[:, None, None, :]
        tokens = None if everything else torch.tensor([step.query_start[r] for r in rows], device=device)
        return _Decodes(tokens, tables[:, :num_pages], mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, plan: TorchPlan) -> Tensor:
        """Store k and v, then attend; see `AttentionBackend.forward`."""
        if self.keys:
            shape = (-1, self.need.num_kv_heads, self.need.head_dim)
            self.keys[layer_id].view(shape).index_copy_(0, plan.slots, k.to(self.need.kv_dtype))
            self.values[layer_id].view(shape).index_copy_(0, plan.slots, v.to(self.need.kv_dtype))
        out = torch.empty_like(q)
        for rows in plan.decodes:
            self._decode(q, rows, layer_id, out)
        for row in plan.prefills:
            self._prefill(q, k, v, row, layer_id, out)
        return out.flatten(1)

    def _gather(self, cache: Tensor, pages: Tensor) -> Tensor:
        """Pages [..., P] of one layer, as [..., P * page_size, num_kv_heads, head_dim] in the query's dtype."""
        got = cache.index_select(0, pages.flatten()).to(self.need.dtype)
        return got.view(*pages.shape[:-1], pages.shape[-1] * self.page_size, *cache.shape[2:])

    def _decode(self, q: Tensor, rows: _Decodes, layer_id: int, out: Tensor) -> None:
        query = q if rows.rows is None else q[rows.rows]
        batch, heads, head_dim = query.shape
        kv_heads = self.need.num_kv_heads
        # The query heads of one KV head stand where several queries would: the products are shared without copies.
        got = F.scaled_dot_product_attention(
            query.view(batch, kv_heads, heads // kv_heads, head_dim),
            self._gather(self.keys[layer_id], rows.pages).transpose(1, 2),
            self._gather(self.values[layer_id], rows.pages).transpose(1, 2),
            attn_mask=rows.mask,
        ).reshape(batch, heads, head_dim)
        if rows.rows is None:
            out.copy_(got)
        else:
            out[rows.rows] = got

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, row: _Prefill, layer_id: int, out: Tensor) -> None:
        if row.pages is None:
            keys, values = k[row.start : row.end], v[row.start : row.end]
        else:
            keys = self._gather(self.keys[layer_id], row.pages)[: row.length]
            values = self._gather(self.values[layer_id], row.pages)[: row.length]
        got = F.scaled_dot_product_attention(
            q[row.start : row.end].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=row.mask,
            is_causal=row.mask is None,
            enable_gqa=True,
        )
        out[row.start : row.end] = got[0].transpose(0, 1)


def _zeros(shape: tuple[int, ...], need: AttentionNeed) -> Tensor:
    if need.device.type != "cpu":
        return torch.zeros(shape, dtype=need.kv_dtype, device=need.device)
    # numpy asks the system for zeroed pages, which cost nothing until they are written; torch writes them all.
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * need.kv_dtype.itemsize, np.uint8)).view(need.kv_dtype).view(shape)
    )
