"""Paged attention by Triton kernels: CUDA's default. triton is imported when a backend is chosen, not before."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from server.engine.attention.base import AttentionNeed, KernelPages, StepMetadata, UniformStep, Unsupported
from server.engine.attention.paged_cache import KV_TYPES, PagedCache, page_bytes
from server.engine.attention.triton_plan import (
    MAX_PARTS,
    Rows,
    Tiles,
    TritonPlan,
    longest_part,
    plan_rows,
    plan_uniform,
    power_of_two,
    tile_shapes,
)
from server.engine.kernels.available import fp8_problem, triton_problem

MAX_HEAD_DIM = 256
CACHE_LINE = 128
FETCHED = 512
"""Keys that a program brings into the L2 cache while it waits for its queries."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TritonAttention:
    """Flash-style attention that reads keys and values in their pages.

    It is a `CapturableAttention` and a `RotatingAttention`.
    """

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
        if need.kv_dtype not in KV_TYPES:
            return Unsupported(f"KV cache of dtype {need.kv_dtype} (it stores float32, float16, bfloat16 or fp8)")
        problem = triton_problem(need.device)
        if problem is None and need.kv_dtype not in FLOATS and need.device.type == "cuda":
            problem = fp8_problem(need.device)
        return None if problem is None else Unsupported(problem)

    def __init__(self, need: AttentionNeed, num_layers: int) -> None:
        from server.engine.attention import triton_decode, triton_kernels
        from server.engine.kernels import rotate, runtime

        self.need = need
        self.num_layers = num_layers
        self.cache: PagedCache | None = None
        self._kernels = triton_kernels
        self._decode = triton_decode
        self._runtime = runtime
        self._rotate = rotate
        self._group = need.num_heads // need.num_kv_heads
        self._dim_padded = max(16, power_of_two(need.head_dim))  # tl.dot takes no less than 16
        self._shapes = tile_shapes(need)
        self._compute = _compute_type(need)
        self._scale = math.log2(math.e) / math.sqrt(need.head_dim)

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
        """Cut the step into rows with few new tokens (decode, verify) and tiles of the longer ones.

        Raises:
            ValueError: a row has context, but there is no cache yet.
        """
        for row, length in enumerate(step.seq_lens):
            context = length - (step.query_start[row + 1] - step.query_start[row])
            if context and self.cache is None:
                raise ValueError(f"row {row} has {context} tokens of context before the KV cache was allocated")
        return plan_rows(step, self.need, self._shapes, split=self.cache is not None)

    def longest_query(self) -> int:
        """The most new tokens a row of a uniform step may have."""
        return self._shapes.short // self._group

    def plan_uniform(self, step: UniformStep) -> TritonPlan:
        """See `CapturableAttention.plan_uniform`."""
        if self.cache is None:
            raise ValueError("a uniform step before the KV cache was allocated")
        if step.query_len > self.longest_query():
            raise ValueError(f"{step.query_len} new tokens a row (at most {self.longest_query()})")
        return plan_uniform(step, self.need, self._shapes)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, plan: TritonPlan) -> Tensor:
        """Store k and v, then attend; see `AttentionBackend.forward`."""
        need = self.need
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if self.cache is None:
            return self._attend(q, k, v, 0, plan)
        keys, values = self._layer(layer_id, self.cache)
        self._kernels.store_kv[(len(plan.slots),)](
            k,
            v,
            keys,
            values,
            plan.slots,
            *k.stride()[:2],
            *v.stride()[:2],
            NUM_KV_HEADS=need.num_kv_heads,
            HEADS_PADDED=power_of_two(need.num_kv_heads),
            HEAD_DIM=need.head_dim,
            DIM_PADDED=self._dim_padded,
        )
        return self._attend(q, keys, values, self.cache.page_size, plan)

    def forward_qkv(
        self,
        qkv: Tensor,
        head_norms: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        layer_id: int,
        plan: TritonPlan,
    ) -> Tensor:
        """See `RotatingAttention.forward_qkv`."""
        heads, kv_heads = self.need.num_heads, self.need.num_kv_heads
        if self.cache is None:
            got = self._rotate.rotate_qkv(qkv, head_norms, eps, cos, sin, heads, kv_heads, None)
            q, k, v = torch.split(got, [heads, kv_heads, kv_heads], dim=1)
            return self._attend(q, k, v, 0, plan)
        keys, values = self._layer(layer_id, self.cache)
        queries = self._rotate.rotate_qkv(qkv, head_norms, eps, cos, sin, heads, kv_heads, (keys, values, plan.slots))
        return self._attend(queries, keys, values, self.cache.page_size, plan)

    def _layer(self, layer_id: int, cache: PagedCache) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [slots, kv_heads, head_dim]."""
        return cache.keys[layer_id].flatten(0, 1), cache.values[layer_id].flatten(0, 1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, page_size: int, plan: TritonPlan) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.tiles is not None:
            self._attend_tiles(q, keys, values, out, page_size, plan.tiles, plan.block_tables)
        for rows in plan.rows:
            self._attend_rows(q, keys, values, out, page_size, rows, plan.block_tables)
        return out.flatten(1)

    def _attend_tiles(
        self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, page_size: int, tiles: Tiles, tables: Tensor
    ) -> None:
        self._kernels.attend[(len(tiles.table), self.need.num_kv_heads)](
            q,
            keys,
            values,
            out,
            tiles.table,
            tables,
            tables.stride(0),
            self._scale,
            *q.stride()[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            GROUP=self._group,
            HEAD_DIM=self.need.head_dim,
            DIM_PADDED=self._dim_padded,
            PAGE_SIZE=page_size,
            BLOCK_M=self._shapes.prompt,
            BLOCK_N=self._shapes.keys,
            COMPUTE=self._compute,
            LONGEST=tiles.end if self._runtime.INTERPRETED else 0,
        )

    def _attend_rows(
        self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, page_size: int, rows: Rows, tables: Tensor
    ) -> None:
        need, parts, keys_a_block = self.need, rows.parts, self._shapes.keys
        tokens, count = len(q), len(rows.lengths)
        table = rows.lengths if rows.table is None else rows.table
        open_sums = out
        pieces = out
        if parts > 1:
            pieces = torch.empty((parts, *out.shape), dtype=torch.float32, device=q.device)
            open_sums = torch.empty((parts, tokens, need.num_heads), dtype=torch.float32, device=q.device)
        self._decode.attend_part[(need.num_kv_heads, count, parts)](
            q,
            keys,
            values,
            pieces,
            open_sums,
            table,
            rows.lengths,
            tables,
            tables.stride(0),
            tokens,
            rows.query_len,
            self._scale,
            *q.stride()[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            UNIFORM=rows.table is None,
            SPLIT=parts > 1,
            GROUP=self._group,
            HEAD_DIM=need.head_dim,
            DIM_PADDED=self._dim_padded,
            PAGE_SIZE=page_size,
            BLOCK_M=rows.block_m,
            BLOCK_N=keys_a_block,
            LINE=CACHE_LINE // need.kv_dtype.itemsize,
            LINES=max(1, self._dim_padded * need.kv_dtype.itemsize // CACHE_LINE),
            FETCHED=FETCHED,
            COMPUTE=self._compute,
            LONGEST_PART=longest_part(rows, keys_a_block) if self._runtime.INTERPRETED else 0,
            num_warps=self._shapes.warps,
            num_stages=self._shapes.stages,
            **self._runtime.launch(q.device),
        )
        if parts > 1:
            self._decode.merge_parts[(count * rows.most_queries, need.num_heads)](
                pieces,
                open_sums,
                out,
                table,
                rows.lengths,
                tokens,
                rows.query_len,
                rows.most_queries,
                parts,
                UNIFORM=rows.table is None,
                HEADS=need.num_heads,
                HEAD_DIM=need.head_dim,
                DIM_PADDED=self._dim_padded,
                BLOCK_N=keys_a_block,
                MAX_PARTS=MAX_PARTS,
                num_warps=2,
                **self._runtime.launch(q.device),
            )


def _compute_type(need: AttentionNeed) -> object:
    """The type of the products' operands, of `triton.language`; sums are always fp32."""
    import triton.language as tl

    from server.engine.kernels.runtime import INTERPRETED

    if need.dtype == torch.bfloat16 and INTERPRETED:
        return tl.float32  # the interpreter's bf16 product reads the bits as integers
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[need.dtype]
