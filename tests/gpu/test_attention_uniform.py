"""Uniform steps as graphs replay them, and the fused rotation, compiled, against fp64 and torch's operations."""

from __future__ import annotations

import math
import os
import secrets

import pytest
import torch
from attention_batches import LAYER, LAYERS, Geometry, assert_attention, make_case
from torch import Tensor

from server.engine.attention.base import UniformStep
from server.engine.attention.torch import TorchAttention
from server.engine.attention.triton import TritonAttention
from server.engine.kernels.norm import rms_norm
from server.engine.layers.attention import Attention
from server.engine.layers.context import BuildContext
from server.engine.layers.rope import RopeConfig, Rotary
from server.engine.parallel import ParallelGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="TRITON_INTERPRET is set: nothing is compiled"),
]
CUDA = torch.device("cuda", 0)
GEOMETRIES = [
    Geometry(heads=32, kv_heads=8, head_dim=128, block_size=16, page_size=16),  # Qwen3-8B
    Geometry(heads=32, kv_heads=4, head_dim=128, block_size=64, page_size=64),  # Qwen3-30B-A3B
    Geometry(heads=8, kv_heads=4, head_dim=256, block_size=128, page_size=128),
    Geometry(heads=9, kv_heads=3, head_dim=64, block_size=64, page_size=32),
]


@pytest.fixture
def seed() -> int:
    """Fresh inputs in every run; a failure shows the number."""
    return secrets.randbits(32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_captured_step_follows_lengths_and_tables(
    geometry: Geometry, query_len: int, dtype: torch.dtype, seed: int
) -> None:
    """Captured over one step's tensors, replayed over others', with a row of padding in between."""
    backend = TritonAttention(geometry.need(CUDA, dtype), LAYERS)
    cases = [
        make_case(geometry, [(past, query_len) for past in pasts], seed=seed + i, dtype=dtype, device=CUDA)
        for i, pasts in enumerate([(5, 64, 700), (2000, 1, 127), (63, 65, 0)])
    ]
    backend.allocate(max(case.num_pages for case in cases), geometry.page_size)
    assert backend.cache is not None
    rows, tokens = 4, 4 * query_len
    q = torch.zeros(tokens, geometry.heads, geometry.head_dim, dtype=dtype, device=CUDA)
    k = torch.zeros(tokens, geometry.kv_heads, geometry.head_dim, dtype=dtype, device=CUDA)
    v = torch.zeros_like(k)
    step = UniformStep(
        query_len,
        4096,
        torch.zeros(rows, dtype=torch.int32, device=CUDA),
        torch.zeros(rows, 4096 // geometry.page_size, dtype=torch.int64, device=CUDA),
        torch.full((tokens,), -1, dtype=torch.int64, device=CUDA),
    )

    def work() -> Tensor:
        return backend.forward(q, k, v, LAYER, backend.plan_uniform(step))

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    # Rows 0, 1 and 3 are real, 2 is padding.
    real = [0, 1, 3]
    at = torch.cat([torch.arange(r * query_len, (r + 1) * query_len) for r in real]).to(CUDA)
    for case in cases:
        for tensor in (*backend.cache.keys, *backend.cache.values):
            tensor.fill_(math.nan)
        for slots, past_k, past_v in case.pasts:
            backend.cache.keys[LAYER].flatten(0, 1)[slots] = past_k
            backend.cache.values[LAYER].flatten(0, 1)[slots] = past_v
        q[at], k[at], v[at] = case.q, case.k, case.v
        step.slot_mapping[at] = case.step.slot_mapping
        step.seq_lens[real] = torch.tensor(case.step.seq_lens, dtype=torch.int32, device=CUDA)
        for r, table in zip(real, case.step.block_tables, strict=True):
            step.block_tables[r, : len(table)] = table
        out.fill_(math.nan)
        graph.replay()
        assert_attention(out[at], case.expected())
        assert (out[2 * query_len : 3 * query_len] == 0).all()


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_layers_agree_with_torch_operations(geometry: Geometry, normed: bool, seed: int) -> None:
    """In fp32: the layer's norms, rotation and attention in kernels, against the same layer over torch's."""
    rows = [(0, 70), (30, 1), (517, 4), (64, 1)]
    case = make_case(geometry, rows, seed=seed, device=CUDA)
    need = geometry.need(CUDA, torch.float32)
    positions = torch.cat([torch.arange(past, past + new) for past, new in rows]).to(CUDA)
    angles = Rotary(RopeConfig("default", 10000.0, geometry.head_dim, 4096, 4096), torch.float32, CUDA)(positions)
    random = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(len(positions), 64, generator=random, device=CUDA)
    outs: list[list[Tensor]] = []
    weights: dict[str, Tensor] = {}
    for backend in (TorchAttention(need, LAYERS), TritonAttention(need, LAYERS)):
        context = BuildContext(torch.float32, CUDA, backend, "torch", ParallelGroup())
        layer = Attention(
            64, geometry.heads, geometry.kv_heads, geometry.head_dim, 1, context, qk_norm_eps=1e-5 if normed else None
        )
        for name, target in layer.weight_targets("a").items():
            scale = 1.0 if "norm" in name else 0.1
            fresh = torch.randn(target.shape, generator=random, device=CUDA) * scale
            target.copy_(weights.setdefault(name, fresh))
        if layer.qk_norm is not None:
            layer.qk_norm.finish_loading()
        backend.allocate(case.num_pages, geometry.page_size)
        assert backend.cache is not None
        for slots, past_k, past_v in case.pasts:
            backend.cache.keys[1].flatten(0, 1)[slots] = past_k
            backend.cache.values[1].flatten(0, 1)[slots] = past_v
        out = layer(x, angles, backend.plan(case.step))
        outs.append([out, backend.cache.keys[1], backend.cache.values[1]])
    for want, got in zip(*outs, strict=True):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


def test_a_chain_of_dependent_kernels_in_a_graph(seed: int) -> None:
    """Kernels that start before the last one ended must still see all that it wrote, replay after replay."""
    random = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(64, 4096, generator=random, device=CUDA)
    weight = torch.rand(4096, generator=random, device=CUDA)
    total = torch.zeros_like(x)

    def chain(residual: Tensor) -> Tensor:
        y = x
        for _ in range(200):
            y = rms_norm(y, residual, weight, 1e-6)
        return y

    chain(total)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(total)
    for _ in range(5):
        x.normal_(generator=random)
        total.zero_()
        graph.replay()
        want_total, y = torch.zeros(64, 4096, dtype=torch.float64, device=CUDA), x.double()
        for _ in range(200):
            want_total = want_total + y
            y = torch.nn.functional.rms_norm(want_total, (4096,), weight.double(), 1e-6)
        torch.testing.assert_close(out.double(), y, atol=1e-3, rtol=1e-3)
