"""The KV cache of one model and KV group: pages of keys and values, layer by layer."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from server.engine.attention.base import AttentionNeed

FP8_MAX = 448.0
"""The largest number of e4m3."""
KV_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


class PagedCache:
    """Two tensors a layer, [num_pages, page_size, num_kv_heads, head_dim] ("NHD"), in the KV dtype."""

    def __init__(self, need: AttentionNeed, num_layers: int, num_pages: int, page_size: int) -> None:
        shape = (num_pages, page_size, need.num_kv_heads, need.head_dim)
        self.page_size = page_size
        self.keys = [_zeros(shape, need) for _ in range(num_layers)]
        self.values = [_zeros(shape, need) for _ in range(num_layers)]

    def store(self, layer_id: int, keys: Tensor, values: Tensor, slots: Tensor | slice) -> None:
        """Write new tokens' keys and values, [T, num_kv_heads, head_dim] each, into their slots of one layer."""
        for cache, new in ((self.keys, keys), (self.values, values)):
            entries = as_bits(cache[layer_id].flatten(0, 1))
            stored = as_bits(storable(new, cache[layer_id].dtype))
            if isinstance(slots, slice):
                entries[slots] = stored
            else:
                entries.index_copy_(0, slots, stored)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages (int64 [N] each) in all layers; all are read before any is written."""
        for cache in map(as_bits, (*self.keys, *self.values)):
            cache.index_copy_(0, targets, cache.index_select(0, sources))


def page_bytes(need: AttentionNeed, num_layers: int, page_size: int) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * num_layers * page_size * need.num_kv_heads * need.head_dim * need.kv_dtype.itemsize


def storable(entries: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """Keys or values in the cache's dtype; what lies beyond fp8's range becomes its end, where torch would make NaN."""
    if kv_dtype is torch.float8_e4m3fn:
        entries = entries.clamp(-FP8_MAX, FP8_MAX)
    return entries.to(kv_dtype)


def as_bits(cache: Tensor) -> Tensor:
    """The same memory in a type that torch can index on every device: it cannot index fp8 on some."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


def _zeros(shape: tuple[int, ...], need: AttentionNeed) -> Tensor:
    if need.device.type != "cpu":
        return torch.zeros(shape, dtype=need.kv_dtype, device=need.device)
    # numpy asks the system for zeroed pages, which cost nothing until they are written; torch writes them all.
    zeros = np.zeros(math.prod(shape) * need.kv_dtype.itemsize, np.uint8)
    return torch.from_numpy(zeros).view(need.kv_dtype).view(shape)
