"""The Triton attention backend, compiled, against TorchAttention and attention by its definition."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import secrets

import pytest
import torch
from attention_batches import LAYER, LAYERS, MIXED, Geometry, assert_attention, make_case, run

from server.engine.attention.torch import TorchAttention
from server.engine.attention.triton import TritonAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="TRITON_INTERPRET is set: nothing is compiled"),
]
CUDA = torch.device("cuda", 0)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)

GEOMETRIES = [
    Geometry(heads=2, kv_heads=2, head_dim=16),
    Geometry(heads=9, kv_heads=3, head_dim=64),  # SmolLM2-135M
    Geometry(heads=32, kv_heads=8, head_dim=128, block_size=64, page_size=32),  # Qwen3-8B
    Geometry(heads=32, kv_heads=4, head_dim=128, block_size=64, page_size=64),  # Qwen3-30B-A3B
    Geometry(heads=12, kv_heads=1, head_dim=128, block_size=128, page_size=128),
    Geometry(heads=8, kv_heads=4, head_dim=256, block_size=256, page_size=128),
    Geometry(heads=20, kv_heads=1, head_dim=32, block_size=48, page_size=16),
    Geometry(heads=3, kv_heads=3, head_dim=80),
]


@pytest.fixture
def seed() -> int:
    """Fresh inputs in every run; a failure shows the number."""
    return secrets.randbits(32)


@DTYPES
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_mixed_rows_agree_with_the_reference_and_the_definition(
    geometry: Geometry, dtype: torch.dtype, seed: int
) -> None:
    case = make_case(geometry, MIXED, seed=seed, dtype=dtype, device=CUDA)
    need = geometry.need(CUDA, dtype)
    got = run(TritonAttention(need, LAYERS), case, unused=math.nan)
    assert got.dtype == dtype
    assert_attention(got, case.expected())
    assert_attention(got, run(TorchAttention(need, LAYERS), case, unused=0.0), scale=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES[1:4], ids=str)
def test_an_fp8_cache(geometry: Geometry, dtype: torch.dtype, seed: int) -> None:
    fp8 = torch.float8_e4m3fn
    case = make_case(geometry, MIXED, seed=seed, dtype=dtype, device=CUDA)
    pasts = [(slots, k.to(fp8).to(dtype), v.to(fp8).to(dtype)) for slots, k, v in case.pasts]
    case = dataclasses.replace(case, k=case.k.to(fp8).to(dtype), v=case.v.to(fp8).to(dtype), pasts=pasts)
    need = geometry.need(CUDA, dtype, fp8)
    assert_attention(run(TritonAttention(need, LAYERS), case, unused=8.0), case.expected())


@DTYPES
@pytest.mark.parametrize("kind", ["prompts", "chunks", "decodes", "verifications", "all"])
def test_random_steps_agree_with_the_definition(kind: str, dtype: torch.dtype, seed: int) -> None:
    choose = random.Random(seed)
    rows = {
        "prompts": lambda: (0, choose.randint(1, 300)),
        "chunks": lambda: (choose.randint(1, 1000), choose.randint(1, 200)),
        "decodes": lambda: (choose.randint(1, 3000), 1),
        "verifications": lambda: (choose.randint(1, 1000), choose.randint(2, 9)),
    }
    for _ in range(4):
        kinds = [kind] if kind in rows else list(rows)
        step = [rows[choose.choice(kinds)]() for _ in range(choose.randint(1, 6))]
        page_size = choose.choice([16, 32, 64, 128])
        geometry = Geometry(8, 2, 128, page_size * choose.randint(1, 2), page_size)
        case = make_case(geometry, step, seed=choose.getrandbits(32), dtype=dtype, device=CUDA)
        backend = TritonAttention(geometry.need(CUDA, dtype), LAYERS)
        assert_attention(run(backend, case, unused=math.nan), case.expected())


@DTYPES
def test_many_decodes(dtype: torch.dtype, seed: int) -> None:
    geometry = Geometry(32, 8, 128)
    case = make_case(geometry, [(37 * i % 900 + 1, 1) for i in range(128)], seed=seed, dtype=dtype, device=CUDA)
    backend = TritonAttention(geometry.need(CUDA, dtype), LAYERS)
    assert_attention(run(backend, case, unused=math.nan), case.expected())


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float32], ids=str)
def test_a_cache_of_another_dtype(kv_dtype: torch.dtype, seed: int) -> None:
    geometry = Geometry(8, 2, 64)
    case = make_case(geometry, MIXED, seed=seed, dtype=torch.bfloat16, device=CUDA)
    backend = TritonAttention(geometry.need(CUDA, torch.bfloat16, kv_dtype), LAYERS)
    assert_attention(run(backend, case, unused=math.nan), case.expected())


@DTYPES
def test_before_there_is_a_cache_rows_see_their_own_tokens(dtype: torch.dtype, seed: int) -> None:
    geometry = Geometry(8, 2, 128)
    case = make_case(geometry, [(0, 300), (0, 1), (0, 40)], seed=seed, dtype=dtype, device=CUDA)
    backend = TritonAttention(geometry.need(CUDA, dtype), LAYERS)
    assert_attention(backend.forward(case.q, case.k, case.v, 0, backend.plan(case.step)), case.expected())


def test_a_cache_of_more_than_two_to_the_31_numbers(seed: int) -> None:
    geometry = Geometry(8, 8, 128)
    case = make_case(geometry, [(30, 3), (5, 1)], seed=seed, dtype=torch.bfloat16, device=CUDA)
    backend = TritonAttention(geometry.need(CUDA, torch.bfloat16), LAYERS)
    far = 140_000  # pages of 16 * 8 * 128 numbers: 2.3e9 of them, 4.6 GB a tensor
    if torch.cuda.mem_get_info()[0] < 4.2 * far * 16 * 8 * 128 * 2:
        pytest.skip("needs 20 GB of GPU memory")
    backend.allocate(far, 16)
    assert backend.cache is not None
    shift = far - case.num_pages
    for slots, k, v in case.pasts:
        backend.cache.keys[LAYER].flatten(0, 1)[slots + shift * 16] = k
        backend.cache.values[LAYER].flatten(0, 1)[slots + shift * 16] = v
    case.step.block_tables.add_(shift)
    case.step.slot_mapping.add_(shift * 16)
    assert_attention(backend.forward(case.q, case.k, case.v, LAYER, backend.plan(case.step)), case.expected())
