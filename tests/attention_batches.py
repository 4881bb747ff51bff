"""Random paged batches for attention backends, and attention by its definition to compare them with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from server.engine.attention.base import AttentionNeed, StepMetadata
from server.engine.attention.flashinfer import FlashInferAttention
from server.engine.attention.torch import TorchAttention
from server.engine.attention.triton import TritonAttention
from server.engine.batch import Span, make_batch

Backend = TorchAttention | TritonAttention | FlashInferAttention
LAYERS, LAYER = 2, 1
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}
"""Absolute and relative; half dtypes: a few units of rounding of inputs, weights and outputs of about 1."""

MIXED = ((0, 21), (16, 1), (30, 7), (47, 4), (70, 1), (5, 1), (0, 1))
"""(context, new tokens): a prompt, a chunk with context, decodes, verifications, a prompt of one token."""


@dataclass(frozen=True)
class Geometry:
    """Heads and pages of a KV group."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    page_size: int = 16

    def need(self, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> AttentionNeed:
        return AttentionNeed(device, dtype, kv_dtype or dtype, self.heads, self.kv_heads, self.head_dim)


@dataclass(frozen=True)
class Case:
    """One step over rows that have a past."""

    geometry: Geometry
    step: StepMetadata
    q: Tensor
    k: Tensor
    v: Tensor
    pasts: list[tuple[Tensor, Tensor, Tensor]]
    """Per row: slots, keys and values of its context."""
    num_pages: int

    def expected(self) -> Tensor:
        """Causal softmax attention, query by query, in fp64: [T, heads * head_dim]."""
        g = self.geometry
        out = []
        for r, (_, past_k, past_v) in enumerate(self.pasts):
            own = slice(self.step.query_start[r], self.step.query_start[r + 1])
            keys = torch.cat([past_k, self.k[own]]).double().repeat_interleave(g.heads // g.kv_heads, dim=1)
            values = torch.cat([past_v, self.v[own]]).double().repeat_interleave(g.heads // g.kv_heads, dim=1)
            for i, query in enumerate(self.q[own].double()):
                seen = len(past_k) + i + 1
                scores = torch.einsum("hd,lhd->hl", query, keys[:seen]) / math.sqrt(g.head_dim)
                out.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), values[:seen]).flatten())
        return torch.stack(out)


def make_case(
    geometry: Geometry,
    rows: Sequence[tuple[int, int]],
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    sharpness: float = 1.0,
) -> Case:
    """Fresh normal q, k and v, laid out as a model's layers do, and blocks in random order; block 0 is nobody's.

    Args:
        geometry: heads and pages.
        rows: (context, new tokens) of each.
        seed: of everything random.
        dtype: of all tensors.
        device: where they lie; the CPU by default.
        sharpness: a factor on the queries.
    """
    g, device = geometry, device or torch.device("cpu")
    random = torch.Generator().manual_seed(seed)
    blocks_of = [-(-(past + new) // g.block_size) for past, new in rows]
    num_blocks = sum(blocks_of) + 2
    free = (torch.randperm(num_blocks - 1, generator=random) + 1).tolist()
    tables = [[free.pop() for _ in range(count)] for count in blocks_of]
    spans = [Span(table, past, [7] * new) for table, (past, new) in zip(tables, rows, strict=True)]
    step = make_batch(spans, g.block_size, g.page_size, device).step

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device, dtype)

    pasts = []
    for table, (past, _) in zip(tables, rows, strict=True):
        places = torch.arange(past)
        slots = torch.tensor(table)[places // g.block_size] * g.block_size + places % g.block_size
        pasts.append((slots.to(device), normal(past, g.kv_heads, g.head_dim), normal(past, g.kv_heads, g.head_dim)))
    total = step.query_start[-1]
    qk = normal(total, g.heads + g.kv_heads, g.head_dim)
    qk[:, : g.heads] *= sharpness
    v = normal(total, (g.heads + 2 * g.kv_heads) * g.head_dim)[:, -g.kv_heads * g.head_dim :]
    return Case(
        geometry=g,
        step=step,
        q=qk[:, : g.heads],
        k=qk[:, g.heads :],
        v=v.unflatten(1, (g.kv_heads, g.head_dim)),
        pasts=pasts,
        num_pages=num_blocks * (g.block_size // g.page_size),
    )


def run(backend: Backend, case: Case, *, unused: float) -> Tensor:
    """One layer's attention over a cache whose unused slots hold `unused`, into memory full of NaN.

    Checks that the step's keys and values went into their slots and nothing else was touched, in any layer.
    """
    backend.allocate(case.num_pages, case.geometry.page_size)
    keys, values = _cache(backend)
    for tensor in (*keys, *values):
        tensor.fill_(unused)
    for slots, past_k, past_v in case.pasts:
        _flat(keys[LAYER])[slots] = past_k.to(keys[LAYER].dtype)
        _flat(values[LAYER])[slots] = past_v.to(values[LAYER].dtype)
    expected_keys, expected_values = ([tensor.clone() for tensor in cache] for cache in (keys, values))
    _flat(expected_keys[LAYER])[case.step.slot_mapping] = case.k.to(keys[LAYER].dtype)
    _flat(expected_values[LAYER])[case.step.slot_mapping] = case.v.to(values[LAYER].dtype)
    # On CUDA it would make torch's products refuse to run; the reference is not what is tested there.
    poisoned = case.q.device.type == "cpu" or isinstance(backend, TritonAttention)
    with memory_full_of_nan(case.q.device) if poisoned else nullcontext():
        out = backend.forward(case.q, case.k, case.v, LAYER, backend.plan(case.step))
    for layer in range(LAYERS):
        torch.testing.assert_close(keys[layer], expected_keys[layer], atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(values[layer], expected_values[layer], atol=0, rtol=0, equal_nan=True)
    return out


def assert_attention(got: Tensor, expected: Tensor, *, scale: float = 1.0) -> None:
    """Equal within the tolerance of `got`'s dtype, times `scale`."""
    absolute, relative = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), atol=absolute * scale, rtol=relative * scale)


@contextmanager
def memory_full_of_nan(device: torch.device) -> Iterator[None]:
    """Within it, new memory that nobody has written yet reads as NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3, device=device).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _cache(backend: Backend) -> tuple[list[Tensor], list[Tensor]]:
    assert backend.cache is not None
    return backend.cache.keys, backend.cache.values


def _flat(cache: Tensor) -> Tensor:
    return cache.flatten(0, 1)
