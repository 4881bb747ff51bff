"""An fp8 KV cache: both backends store what torch's e4m3 rounds to, and attend over exactly that."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from attention_batches import LAYERS, MIXED, Backend, Case, Geometry, assert_attention, make_case, run
from torch import Tensor

from server.engine.attention.torch import TorchAttention
from server.engine.attention.triton import TritonAttention

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
torch.set_num_threads(1)

interpreted = pytest.mark.skipif(
    torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"), reason="tests/gpu compares compiled kernels"
)
BACKENDS = [TorchAttention, pytest.param(TritonAttention, marks=interpreted)]
GEOMETRY = Geometry(heads=6, kv_heads=2, head_dim=64, block_size=32, page_size=32)


def rounded(case: Case) -> Case:
    """The same keys and values, rounded to fp8 beforehand: what attention then makes of them is exact."""

    def through(x: Tensor) -> Tensor:
        return x.to(FP8).to(x.dtype)

    pasts = [(slots, through(k), through(v)) for slots, k, v in case.pasts]
    return dataclasses.replace(case, k=through(case.k), v=through(case.v), pasts=pasts)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_over_an_fp8_cache(backend: type[Backend]) -> None:
    case = rounded(make_case(GEOMETRY, MIXED, seed=5))
    built = backend(GEOMETRY.need(CPU, torch.float32, FP8), LAYERS)
    assert_attention(run(built, case, unused=8.0), case.expected())
    assert built.page_bytes(32) * 4 == backend(GEOMETRY.need(CPU, torch.float32), LAYERS).page_bytes(32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_beyond_the_range_is_stored_as_its_end(backend: type[Backend]) -> None:
    """Beyond 448 torch's own conversion would give NaN, which poisons every later token."""
    case = make_case(GEOMETRY, ((0, 3), (33, 1)), seed=6)

    def widened(x: Tensor) -> Tensor:
        """Numbers that fp8 holds, and larger ones: triton's interpreter does not round as devices do."""
        wide = x * 300
        return torch.where(wide.abs() > 448, wide, wide.clamp(-448, 448).to(FP8).to(x.dtype))

    wide = dataclasses.replace(case, k=widened(case.k), v=widened(case.v))
    assert stored_of(backend, wide) == [x.clamp(-448, 448).tolist() for x in (wide.k, wide.v)]


def test_stored_values_round_to_the_nearest() -> None:
    case = make_case(GEOMETRY, ((0, 3), (33, 1)), seed=7)
    assert stored_of(TorchAttention, case) == [x.to(FP8).float().tolist() for x in (case.k, case.v)]


def stored_of(backend: type[Backend], case: Case) -> list[list[float]]:
    """The step's keys and values, as they lie in the cache."""
    built = backend(GEOMETRY.need(CPU, torch.float32, FP8), LAYERS)
    built.allocate(case.num_pages, GEOMETRY.page_size)
    built.forward(case.q, case.k, case.v, 0, built.plan(case.step))
    assert built.cache is not None
    caches = (built.cache.keys[0], built.cache.values[0])
    return [cache.flatten(0, 1).float()[case.step.slot_mapping].tolist() for cache in caches]


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_are_copied_bit_by_bit(backend: type[Backend]) -> None:
    built = backend(GEOMETRY.need(CPU, torch.float32, FP8), LAYERS)
    built.allocate(4, GEOMETRY.page_size)
    assert built.cache is not None
    bits = built.cache.keys[1].view(torch.uint8)
    bits.copy_(torch.randint(0, 127, bits.shape, dtype=torch.uint8))
    built.copy_pages(torch.tensor([0, 1]), torch.tensor([2, 3]))
    assert torch.equal(bits[2:], bits[:2])
