"""Compiled kernels of layers and experts against fp64: fresh inputs, outputs poisoned with NaN before each run."""

from __future__ import annotations

import os
import secrets

import pytest
import torch
import torch.nn.functional as F
from attention_batches import memory_full_of_nan
from moe_cases import FORMATS, expected, make_experts, random_inputs
from torch import Tensor

from server.engine.moe.base import MoENeed
from server.engine.moe.registry import MOE_BACKENDS
from server.engine.quantization.format import UNQUANTIZED, QuantizedFormat, WeightFormat
from server.engine.quantization.quantize import quantize
from server.engine.quantization.stored import QuantizedTensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="TRITON_INTERPRET is set: nothing is compiled"),
]
CUDA = torch.device("cuda", 0)
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
RELATIVE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Of the error's norm: inputs are exact in their dtype, so it comes from rounding outputs and intermediate results."""


@pytest.fixture
def seed() -> int:
    """Fresh inputs in every run; a failure shows the number."""
    return secrets.randbits(32)


def assert_near(got: Tensor, want: Tensor, *, factor: float = 1.0) -> None:
    """Every element written, and the error's norm small beside the result's."""
    assert got.shape == want.shape and torch.isfinite(got).all()
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error <= RELATIVE[got.dtype] * factor, f"relative error {error:.2e}"


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device=CUDA).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (7, 2048), (300, 576), (3, 12288)])
def test_norm_and_activation(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    from server.engine.kernels.activation import silu_mul
    from server.engine.kernels.norm import rms_norm

    x, residual, weight = (normal(seed + i, *s, dtype=dtype) for i, s in enumerate([(rows, size)] * 2 + [(size,)]))
    with memory_full_of_nan(CUDA):
        total = residual.clone()
        got = rms_norm(x, total, weight, 1e-6)
        gated = silu_mul(x)
    torch.testing.assert_close(total, x + residual, atol=0, rtol=0)
    assert_near(got, F.rms_norm(total.double(), (size,), weight.double(), 1e-6))
    gate, up = x.double().chunk(2, -1)
    assert_near(gated, F.silu(gate) * up)


@HALVES
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 17, 40, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (128, 2048), (4096, 12288), (151936, 2048), (200, 72)])
def test_linear_layers_of_few_rows(outputs: int, inputs: int, rows: int, dtype: torch.dtype, seed: int) -> None:
    from server.engine.kernels.linear import make_counters, tile_shape, vector_shape
    from server.engine.kernels.matvec import MOST_VECTOR_ROWS, tiles, vectors

    x, weight, bias = normal(seed, rows, inputs, dtype=dtype), normal(seed + 1, outputs, inputs, dtype=dtype), None
    if outputs == 6144:
        bias = normal(seed + 2, outputs, dtype=dtype)
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    counters = make_counters(outputs, CUDA)
    shape = tile_shape(rows, outputs, inputs)
    with memory_full_of_nan(CUDA):
        assert_near(tiles(x, weight, bias, shape), want)
        got = [tiles(x, weight, bias, shape, counters) for _ in range(20)]
        assert_near(got[0], want)
        assert all(torch.equal(other, got[0]) for other in got) and not counters.any()
        if rows <= MOST_VECTOR_ROWS:
            assert_near(vectors(x, weight, bias, vector_shape(rows, outputs, inputs)), want)


@pytest.mark.parametrize("rows", [1, 3, 8, 50])
def test_gated_products(rows: int, seed: int) -> None:
    from server.engine.kernels.linear import few_rows, make_counters

    x, weight = normal(seed, rows, 2048), normal(seed + 1, 2 * 1000, 2048) / 20
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    with memory_full_of_nan(CUDA):
        got = few_rows(x, weight, None, make_counters(2000, CUDA), gated=True)
    assert got is not None
    assert_near(got, F.silu(gate) * up)


@HALVES
@pytest.mark.parametrize("rows", [1, 4, 5, 33, 300])
@pytest.mark.parametrize("format", [one for one in FORMATS if one != UNQUANTIZED], ids=lambda one: one.label)
def test_packed_linear_layers(format: QuantizedFormat, rows: int, dtype: torch.dtype, seed: int) -> None:
    from server.engine.kernels.packed_linear import pack, packed_linear, unpackable_linear

    shards = []
    for place, outputs in enumerate((1024, 256, 256)):
        weight = normal(seed + place, outputs, 2048, dtype=torch.float32) / 45 * (place + 1)
        stored = QuantizedTensors.allocate(format, outputs, 2048, CUDA)
        for name, part in quantize(weight, format).items():
            stored.parts[name].copy_(part)
        shards.append(stored)
    assert unpackable_linear(shards, CUDA) is None
    x, bias = normal(seed + 4, rows, 2048, dtype=dtype), normal(seed + 5, 1536, dtype=dtype)
    whole = torch.cat([shard.dequantize(torch.float32) for shard in shards])
    with memory_full_of_nan(CUDA):
        got = packed_linear(x, pack(shards, dtype), bias)
    # Scales of 4-bit integers are rounded to the model's dtype.
    assert_near(got, x.double() @ whole.double().T + bias.double(), factor=2.0)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (60, 6)])
def test_softmax_router(experts: int, top_k: int, renormalize: bool, seed: int) -> None:
    from server.engine.kernels.choose_experts import softmax_topk

    logits = normal(seed, 100, experts, dtype=torch.float32)
    ids, weights = softmax_topk(logits, top_k, renormalize)
    want, want_ids = logits.double().softmax(-1).topk(top_k)
    assert torch.equal(ids, want_ids)
    assert_near(weights, want / want.sum(-1, keepdim=True) if renormalize else want)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.label}-{getattr(format, 'layout', '')}")
@pytest.mark.parametrize("sizes", [(6, 160, 96), (16, 2048, 768)], ids=str)
def test_experts_of_every_format(format: WeightFormat, sizes: tuple[int, int, int], seed: int) -> None:
    from server.engine.kernels import experts as kernels

    count, hidden, width = sizes
    top_k = min(8, count // 2)
    for dtype in (torch.bfloat16, torch.float16) if format == UNQUANTIZED else (torch.bfloat16,):
        need = MoENeed(CUDA, dtype, count, top_k, hidden, width, format)
        backend = MOE_BACKENDS["triton_w4a16" if format.family in ("int4", "nvfp4") else "triton"]
        assert backend.supports(need) is None
        experts = make_experts(format, dtype, CUDA, seed, sizes)
        packed = backend(need).pack(experts)
        for tokens in (1, 5, 33, 300, 1500):
            x, ids, weights = random_inputs(tokens, dtype, CUDA, seed, (count, top_k, hidden))
            want = expected(x, experts, ids, weights)
            with memory_full_of_nan(CUDA):
                if tokens <= 33:
                    assert_near(kernels.by_pairs(x, packed, ids, weights), want)
                cuts = kernels.group_cuts(x, packed, ids)
                assert_near(kernels.by_groups(x, packed, ids, weights, cuts), want)


def test_experts_in_fp32(seed: int) -> None:
    need = MoENeed(CUDA, torch.float32, 6, 3, 160, 96)
    backend = MOE_BACKENDS["triton"](need)
    experts = make_experts(UNQUANTIZED, torch.float32, CUDA, seed, (6, 160, 96))
    for tokens in (1, 50):
        x, ids, weights = random_inputs(tokens, torch.float32, CUDA, seed, (6, 3, 160))
        got = backend.forward(x, backend.pack(experts), ids, weights)
        assert_near(got, expected(x, experts, ids, weights))


def test_all_tokens_at_one_expert(seed: int) -> None:
    need = MoENeed(CUDA, torch.bfloat16, 6, 1, 160, 96)
    backend = MOE_BACKENDS["triton"](need)
    experts = make_experts(UNQUANTIZED, torch.bfloat16, CUDA, seed, (6, 160, 96))
    x, ids, weights = random_inputs(700, torch.bfloat16, CUDA, seed, (6, 1, 160))
    ids.fill_(3)
    assert_near(backend.forward(x, backend.pack(experts), ids, weights), expected(x, experts, ids, weights))
