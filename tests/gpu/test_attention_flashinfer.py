"""The FlashInfer attention backend against attention by its definition, on a GPU that has the package."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import secrets

import pytest
import torch
from attention_batches import LAYERS, MIXED, Geometry, assert_attention, make_case, run

from server.engine.attention.flashinfer import FlashInferAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"),
]
CUDA = torch.device("cuda", 0)
GEOMETRIES = [
    Geometry(heads=9, kv_heads=3, head_dim=64),
    Geometry(heads=32, kv_heads=8, head_dim=128, block_size=64, page_size=32),
    Geometry(heads=32, kv_heads=16, head_dim=128, block_size=64, page_size=64),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("rows", ["mixed", "decodes", "verifications"])
def test_agrees_with_the_definition(rows: str, geometry: Geometry, dtype: torch.dtype) -> None:
    seed = secrets.randbits(32)
    choose = random.Random(seed)
    drawn = {
        "mixed": MIXED,
        "decodes": tuple((choose.randint(1, 900), 1) for _ in range(20)),
        "verifications": tuple((choose.randint(1, 900), 4) for _ in range(9)),
    }[rows]
    need = geometry.need(CUDA, dtype)
    assert FlashInferAttention.supports(need) is None
    case = make_case(geometry, drawn, seed=seed, dtype=dtype, device=CUDA)
    assert_attention(run(FlashInferAttention(need, LAYERS), case, unused=50.0), case.expected())


@pytest.mark.parametrize("rows", [MIXED, ((70, 1), (300, 1))], ids=["mixed", "decodes"])
def test_an_fp8_cache(rows: tuple[tuple[int, int], ...]) -> None:
    fp8, dtype, geometry = torch.float8_e4m3fn, torch.bfloat16, GEOMETRIES[1]
    case = make_case(geometry, rows, seed=secrets.randbits(32), dtype=dtype, device=CUDA)
    pasts = [(slots, k.to(fp8).to(dtype), v.to(fp8).to(dtype)) for slots, k, v in case.pasts]
    case = dataclasses.replace(case, k=case.k.to(fp8).to(dtype), v=case.v.to(fp8).to(dtype), pasts=pasts)
    backend = FlashInferAttention(geometry.need(CUDA, dtype, fp8), LAYERS)
    assert_attention(run(backend, case, unused=8.0), case.expected())


def test_planning_again_waits_for_the_last_plan() -> None:
    """Many plans in a row, none of them waited for by the caller: each must be its own step's."""
    geometry = GEOMETRIES[1]
    cases = [
        make_case(geometry, ((past, 1), (past + 77, 1)), seed=past, dtype=torch.float16, device=CUDA)
        for past in (5, 100, 900, 40, 300)
    ]
    backends = [FlashInferAttention(geometry.need(CUDA, torch.float16), LAYERS) for _ in cases]
    outs = [run(backend, case, unused=9.0) for backend, case in zip(backends, cases, strict=True)]
    for out, case in zip(outs, cases, strict=True):
        assert_attention(out, case.expected())
    one = backends[0]
    for case in cases:
        assert_attention(run(one, case, unused=9.0), case.expected())
