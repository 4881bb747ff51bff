"""Fused kernels of the layers, in triton's interpreter, against torch's operations in fp32."""

from __future__ import annotations

import math
import os
import secrets

import pytest
import torch
import torch.nn.functional as F
from attention_batches import LAYERS, Geometry, make_case, memory_full_of_nan
from torch import Tensor

from server.engine.attention.torch import TorchAttention
from server.engine.attention.triton import TritonAttention
from server.engine.kernels.activation import silu_mul
from server.engine.kernels.norm import rms_norm
from server.engine.layers.attention import Attention
from server.engine.layers.context import BuildContext
from server.engine.layers.rope import RopeConfig, Rotary
from server.engine.parallel import ParallelGroup

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"),
    reason="kernels are compiled here: tests/gpu compares them (or set TRITON_INTERPRET=1)",
)
CPU = torch.device("cpu")


@pytest.fixture
def seed() -> int:
    """Fresh inputs in every run; a failure shows the number."""
    return secrets.randbits(32)


@pytest.fixture
def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 80), (5, 1), (0, 16)])
def test_rms_norm(rows: int, size: int, dtype: torch.dtype, random: torch.Generator) -> None:
    x, residual = torch.randn(2, rows, size, generator=random).to(dtype)
    weight = torch.randn(size, generator=random).to(dtype)
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if dtype is torch.float32 else {"atol": 2e-3, "rtol": 2e-3}
    with memory_full_of_nan(CPU):
        alone = rms_norm(x, None, weight, 1e-5)
        total = residual.clone()
        added = rms_norm(x, total, weight, 1e-5)
    assert torch.equal(total, x + residual)
    for got, source in ((alone, x), (added, total)):
        assert got.dtype is dtype
        torch.testing.assert_close(got.float(), F.rms_norm(source.float(), (size,), weight.float(), 1e-5), **tolerance)


def test_rms_norm_of_rows_with_a_stride(random: torch.Generator) -> None:
    x, weight = torch.randn(3, 40, generator=random), torch.ones(8)
    torch.testing.assert_close(rms_norm(x[:, 8:16], None, weight, 1e-6), F.rms_norm(x[:, 8:16], (8,), weight, 1e-6))
    torch.testing.assert_close(rms_norm(x[:, ::5], None, weight, 1e-6), F.rms_norm(x[:, ::5], (8,), weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (4, 1500), (0, 8)])
def test_silu_mul(rows: int, size: int, dtype: torch.dtype, random: torch.Generator) -> None:
    x = (torch.randn(rows, 2 * size, generator=random) * 4).to(dtype)
    with memory_full_of_nan(CPU):
        got = silu_mul(x)
    gate, up = x.double().chunk(2, -1)
    assert got.dtype is dtype and got.shape == (rows, size)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2e-3, "rtol": 2e-3}
    torch.testing.assert_close(got.double(), F.silu(gate) * up, **tolerance)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(
    ("geometry", "rotary"), [(Geometry(4, 2, 32), 32), (Geometry(3, 1, 32), 16), (Geometry(6, 2, 80), 80)], ids=str
)
def test_attention_layers_agree_over_both_backends(
    geometry: Geometry, rotary: int, normed: bool, cached: bool, random: torch.Generator
) -> None:
    """One layer's projections, norms, rotation and attention: torch's operations against the fused kernel."""
    rows = [(0, 5), (30, 1), (17, 3)] if cached else [(0, 5), (0, 1), (0, 9)]
    case = make_case(geometry, rows, seed=int(torch.randint(2**31, (1,), generator=random)))
    need = geometry.need(CPU, torch.float32)
    reference, fused = TorchAttention(need, LAYERS), TritonAttention(need, LAYERS)
    positions = torch.cat([torch.arange(past, past + new) for past, new in rows])
    rope = RopeConfig("default", 10000.0, rotary, 4096, 4096)
    angles = Rotary(rope, torch.float32, CPU)(positions)
    x = torch.randn(len(positions), 48, generator=random)
    results: list[Tensor] = []
    layers: list[Attention] = []
    for backend in (reference, fused):
        context = BuildContext(torch.float32, CPU, backend, "torch", ParallelGroup())
        layer = Attention(
            48, geometry.heads, geometry.kv_heads, geometry.head_dim, 1, context, qk_norm_eps=1e-5 if normed else None
        )
        for name, target in layer.weight_targets("a").items():
            scale = 1.0 if "norm" in name else 0.2
            target.copy_(
                dict(layers[0].weight_targets("a"))[name]
                if layers
                else torch.randn(target.shape, generator=random) * scale
            )
        if layer.qk_norm is not None:
            layer.qk_norm.finish_loading()
        layers.append(layer)
        if cached:
            backend.allocate(case.num_pages, geometry.page_size)
            assert backend.cache is not None
            keys, values = backend.cache.keys[1], backend.cache.values[1]
            for slots, past_keys, past_values in case.pasts:
                keys.flatten(0, 1)[slots] = past_keys
                values.flatten(0, 1)[slots] = past_values
        with memory_full_of_nan(CPU):
            results.append(layer(x, angles, backend.plan(case.step)))
        if cached:
            results += [keys.clone(), values.clone()]
    half = len(results) // 2
    for want, got in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    assert not math.isnan(float(results[0].sum()))
