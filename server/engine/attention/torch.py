"""The reference attention: torch's own products over gathered pages. Exact on any device, and the CPU's product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from server.engine.attention.base import AttentionNeed, KernelPages, StepMetadata, Unsupported
from server.engine.attention.paged_cache import KV_TYPES, PagedCache, as_bits, page_bytes

_SHORT = 17
"""Rows of so many new tokens at most, a decode or the longest draft's verification, are computed together."""


@dataclass(frozen=True)
class _Long:
    """A row with many query tokens, computed by itself."""

    start: int
    end: int
    pages: Tensor | None
    """int64 [P] pages holding the row; None when the row has no context and reads its own k and v."""
    length: int
    mask: Tensor | None
    """[Q, length] in the query's dtype; None when the row has no context."""


@dataclass(frozen=True)
class _Short:
    """Rows with q query tokens each and similar length, padded to the longest."""

    tokens: Tensor | None
    """int64 [B * q], their token indices; None when these are all the step's tokens in order."""
    count: int
    """q."""
    pages: Tensor | slice
    """int64 [B, P], or the pages of one row that lie side by side: they are read where they are."""
    mask: Tensor
    """[B, 1, groups * q or 1, P * page_size] in the query's dtype."""


@dataclass(frozen=True)
class TorchPlan:
    """The step, cut into rows that one product can take."""

    slots: Tensor | slice
    """Where the new tokens' keys and values go; a slice for a single one, which is quicker to write."""
    longs: list[_Long]
    shorts: list[_Short]


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
        if need.kv_dtype not in KV_TYPES:
            return Unsupported(f"KV cache of dtype {need.kv_dtype} (it stores float32, float16, bfloat16 or fp8)")
        return None

    def __init__(self, need: AttentionNeed, num_layers: int) -> None:
        self.need = need
        self.num_layers = num_layers
        self._groups = need.num_heads // need.num_kv_heads
        self.cache: PagedCache | None = None

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page over all layers, keys and values."""
        return page_bytes(self.need, self.num_layers, page_size)

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Make the cache, of zeros: padding is read, masked."""
        self.cache = PagedCache(self.need, self.num_layers, num_pages, page_size)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages in all layers; see `AttentionBackend.copy_pages`."""
        if self.cache is not None:
            self.cache.copy_pages(sources, targets)

    def plan(self, step: StepMetadata) -> TorchPlan:
        """Sort the rows into short ones, batched with their like, and longer ones, each by itself."""
        starts, lens = step.query_start, step.seq_lens
        longs: list[_Long] = []
        shorts: dict[tuple[int, int], list[int]] = {}
        for r, length in enumerate(lens):
            new = starts[r + 1] - starts[r]
            if new == length or new > _SHORT:
                longs.append(self._long(step, r, new, length))
            else:
                # Of similar length, so that padding at most doubles what is read.
                shorts.setdefault((new, self._num_pages(length).bit_length()), []).append(r)
        slots: Tensor | slice = step.slot_mapping
        if len(step.slot_mapping) == 1 and step.slot_mapping.device.type == "cpu":
            slot = int(step.slot_mapping)
            slots = slice(slot, slot + 1)
        return TorchPlan(slots, longs, [self._short(step, new, rows) for (new, _), rows in shorts.items()])

    def _num_pages(self, length: int) -> int:
        assert self.cache is not None
        return -(-length // self.cache.page_size)

    def _long(self, step: StepMetadata, row: int, new: int, length: int) -> _Long:
        start, end = step.query_start[row], step.query_start[row + 1]
        if new == length:
            return _Long(start, end, None, length, None)
        device = step.block_tables.device
        # Query i stands at position length - new + i and sees all keys up to itself.
        seen = torch.ones(new, length, dtype=torch.bool, device=device).tril_(length - new)
        return _Long(start, end, step.block_tables[row, : self._num_pages(length)], length, self._additive(seen))

    def _short(self, step: StepMetadata, new: int, rows: list[int]) -> _Short:
        assert self.cache is not None
        device = step.block_tables.device
        lens = torch.tensor([step.seq_lens[r] for r in rows], device=device)
        num_pages = self._num_pages(max(step.seq_lens[r] for r in rows))
        everything = len(rows) == len(step.seq_lens)
        tables = step.block_tables if everything else step.block_tables[torch.tensor(rows, device=device)]
        keys = torch.arange(num_pages * self.cache.page_size, device=device)
        # Query i of a row stands at position length - new + i and sees all keys up to itself.
        last = lens[:, None] - new + torch.arange(new, device=device)
        mask = self._additive(keys <= last[:, :, None])[:, None]
        if new > 1:
            mask = mask.repeat(1, 1, self._groups, 1)
        tokens = None
        if not everything:
            first = torch.tensor([step.query_start[r] for r in rows], device=device)
            tokens = (first[:, None] + torch.arange(new, device=device)).flatten()
        return _Short(tokens, new, _in_place(tables[:, :num_pages]), mask)

    def _additive(self, seen: Tensor) -> Tensor:
        """Made once a step: a bool mask would be converted in every layer."""
        return torch.zeros(seen.shape, dtype=self.need.dtype, device=seen.device).masked_fill_(~seen, float("-inf"))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, plan: TorchPlan) -> Tensor:
        """Store k and v, then attend; see `AttentionBackend.forward`."""
        if self.cache is not None:
            self.cache.store(layer_id, k, v, plan.slots)
        if not plan.longs and len(plan.shorts) == 1 and plan.shorts[0].tokens is None:
            return self._attend_short(q, plan.shorts[0], layer_id).flatten(1)
        out = torch.empty_like(q)
        for rows in plan.shorts:
            if rows.tokens is None:
                out.copy_(self._attend_short(q, rows, layer_id))
            else:
                out[rows.tokens] = self._attend_short(q[rows.tokens], rows, layer_id)
        for row in plan.longs:
            out[row.start : row.end] = self._attend_long(q, k, v, row, layer_id)
        return out.flatten(1)

    def _gather(self, cache: list[Tensor], pages: Tensor | slice, layer_id: int) -> Tensor:
        """Pages [..., P] of one layer, as [..., P * page_size, num_kv_heads, head_dim] in the query's dtype."""
        layer = cache[layer_id]
        if isinstance(pages, slice):
            return layer[pages].flatten(0, 1)[None].to(self.need.dtype)
        got = as_bits(layer).index_select(0, pages.flatten()).view(layer.dtype).to(self.need.dtype)
        return got.view(*pages.shape[:-1], pages.shape[-1] * layer.shape[1], *layer.shape[2:])

    def _attend_short(self, q: Tensor, rows: _Short, layer_id: int) -> Tensor:
        """[B * q, num_heads, head_dim] -> the same."""
        assert self.cache is not None
        batch, kv_heads, head_dim = len(q) // rows.count, self.need.num_kv_heads, self.need.head_dim
        # The query heads of one KV head stand where several queries would: the products are shared without copies.
        query = q.view(batch, rows.count, kv_heads, self._groups, head_dim).permute(0, 2, 3, 1, 4)
        got = F.scaled_dot_product_attention(
            query.reshape(batch, kv_heads, self._groups * rows.count, head_dim),
            self._gather(self.cache.keys, rows.pages, layer_id).transpose(1, 2),
            self._gather(self.cache.values, rows.pages, layer_id).transpose(1, 2),
            attn_mask=rows.mask,
        )
        spread = got.view(batch, kv_heads, self._groups, rows.count, head_dim).permute(0, 3, 1, 2, 4)
        return spread.reshape(q.shape)

    def _attend_long(self, q: Tensor, k: Tensor, v: Tensor, row: _Long, layer_id: int) -> Tensor:
        """The row's [Q, num_heads, head_dim]."""
        if row.pages is None:
            keys, values = k[row.start : row.end], v[row.start : row.end]
        else:
            assert self.cache is not None
            keys = self._gather(self.cache.keys, row.pages, layer_id)[: row.length]
            values = self._gather(self.cache.values, row.pages, layer_id)[: row.length]
        got = F.scaled_dot_product_attention(
            q[row.start : row.end].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=row.mask,
            is_causal=row.mask is None,
            enable_gqa=True,
        )
        return got[0].transpose(0, 1)


def _in_place(tables: Tensor) -> Tensor | slice:
    """One row's pages as a slice where each follows the one before; on the CPU, where looking costs nothing."""
    if len(tables) > 1 or tables.device.type != "cpu":
        return tables
    pages = tables[0].tolist()
    return slice(pages[0], pages[-1] + 1) if pages == list(range(pages[0], pages[-1] + 1)) else tables
