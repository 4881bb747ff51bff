"""The Triton attention backend, in triton's interpreter, against TorchAttention and attention by its definition."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets

import pytest
import torch
from attention_batches import LAYER, LAYERS, MIXED, Geometry, assert_attention, make_case, run
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.attention.torch import TorchAttention
from server.engine.attention.triton import TritonAttention

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"),
    reason="kernels are compiled here: tests/gpu compares them (or set TRITON_INTERPRET=1)",
)
CPU = torch.device("cpu")
torch.set_num_threads(1)  # the interpreter works with small numpy arrays


@pytest.fixture
def seed() -> int:
    """Fresh inputs in every run; a failure shows the number."""
    return secrets.randbits(32)


GEOMETRIES = [
    Geometry(heads=2, kv_heads=2, head_dim=16),
    Geometry(heads=3, kv_heads=1, head_dim=64, block_size=32, page_size=32),
    Geometry(heads=8, kv_heads=2, head_dim=128, block_size=64, page_size=64),
    Geometry(heads=8, kv_heads=1, head_dim=32, block_size=128, page_size=128),
    Geometry(heads=9, kv_heads=3, head_dim=64, block_size=64, page_size=16),
    Geometry(heads=20, kv_heads=1, head_dim=16, block_size=256, page_size=128),
    Geometry(heads=5, kv_heads=5, head_dim=8, block_size=48, page_size=16),
    Geometry(heads=2, kv_heads=1, head_dim=80, block_size=32, page_size=16),
    Geometry(heads=2, kv_heads=1, head_dim=256),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_mixed_rows_agree_with_the_reference_and_the_definition(geometry: Geometry, seed: int) -> None:
    case = make_case(geometry, MIXED, seed=seed)
    need = geometry.need(CPU, torch.float32)
    got = run(TritonAttention(need, LAYERS), case, unused=math.nan)
    assert_attention(got, case.expected())
    assert_attention(got, run(TorchAttention(need, LAYERS), case, unused=50.0))


SIZES = st.integers(1, 40)
ROWS = st.lists(
    st.one_of(
        st.tuples(st.just(0), SIZES),  # a prompt
        st.tuples(SIZES, SIZES),  # a chunk
        st.tuples(st.integers(1, 140), st.just(1)),  # a decode
        st.tuples(st.integers(1, 140), st.integers(2, 9)),  # a verification of 1 to 8 drafts
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=10, deadline=None)
@given(
    rows=ROWS,
    group=st.sampled_from([1, 3, 4, 8]),
    kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([16, 64]),
    page_size=st.sampled_from([16, 32, 64, 128]),
    pages=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_any_batch_agrees_with_the_definition(
    rows: list[tuple[int, int]], group: int, kv_heads: int, head_dim: int, page_size: int, pages: int, seed: int
) -> None:
    geometry = Geometry(group * kv_heads, kv_heads, head_dim, page_size * pages, page_size)
    case = make_case(geometry, rows, seed=seed)
    backend = TritonAttention(geometry.need(CPU, torch.float32), LAYERS)
    assert_attention(run(backend, case, unused=math.nan), case.expected())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("geometry", [Geometry(4, 1, 64, 32, 16), Geometry(3, 3, 16)], ids=str)
def test_half_dtypes_within_their_rounding(geometry: Geometry, dtype: torch.dtype, seed: int) -> None:
    # 40 new tokens make several of the large tiles that prompts get in half dtypes.
    case = make_case(geometry, [(0, 40), (90, 1), (20, 45), (64, 5)], seed=seed, dtype=dtype)
    need = geometry.need(CPU, dtype)
    got = run(TritonAttention(need, LAYERS), case, unused=math.nan)
    assert got.dtype == dtype
    assert_attention(got, case.expected())
    assert_attention(got, run(TorchAttention(need, LAYERS), case, unused=50.0), scale=2)


def test_a_cache_of_another_dtype_rounds_keys_and_values_once(seed: int) -> None:
    geometry = Geometry(4, 2, 32)
    case = make_case(geometry, MIXED, seed=seed)
    rounded = dataclasses.replace(
        case,
        k=case.k.half().float(),
        v=case.v.half().float(),
        pasts=[(slots, k.half().float(), v.half().float()) for slots, k, v in case.pasts],
    )
    backend = TritonAttention(geometry.need(CPU, torch.float32, torch.float16), LAYERS)
    assert_attention(run(backend, case, unused=math.nan), rounded.expected())


def test_scores_far_apart_neither_overflow_nor_vanish(seed: int) -> None:
    geometry = Geometry(4, 2, 64)
    case = make_case(geometry, MIXED, seed=seed, sharpness=60.0)
    backend = TritonAttention(geometry.need(CPU, torch.float32), LAYERS)
    assert_attention(run(backend, case, unused=math.nan), case.expected(), scale=20)


def test_any_strides(seed: int) -> None:
    geometry = Geometry(4, 2, 16)
    case = make_case(geometry, [(0, 5), (9, 2)], seed=seed)
    backend = TritonAttention(geometry.need(CPU, torch.float32), LAYERS)
    want = run(backend, case, unused=math.nan)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.q, case.k, case.v)]
    assert all(x.stride(-1) != 1 for x in turned)
    torch.testing.assert_close(backend.forward(*turned, LAYER, backend.plan(case.step)), want)


def test_before_there_is_a_cache_rows_see_their_own_tokens(seed: int) -> None:
    geometry = Geometry(6, 2, 32)
    case = make_case(geometry, [(0, 30), (0, 1), (0, 4)], seed=seed)
    backend = TritonAttention(geometry.need(CPU, torch.float32), LAYERS)
    got = backend.forward(case.q, case.k, case.v, 0, backend.plan(case.step))
    assert_attention(got, case.expected())
    with pytest.raises(ValueError, match="row 1 has 3 tokens of context before the KV cache was allocated"):
        backend.plan(make_case(geometry, [(0, 3), (3, 1)], seed=0).step)


def test_pages_are_copied_and_counted_as_in_the_reference() -> None:
    need = Geometry(4, 2, 16).need(CPU, torch.float16)
    backend = TritonAttention(need, 3)
    assert backend.page_bytes(32) == TorchAttention(need, 3).page_bytes(32) == 2 * 3 * 32 * 2 * 16 * 2
    backend.allocate(4, 32)
    assert backend.cache is not None
    tensors = [*backend.cache.keys, *backend.cache.values]
    assert sum(tensor.nbytes for tensor in tensors) == 4 * backend.page_bytes(32)
    for tensor in tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in tensors]
    backend.copy_pages(torch.tensor([0, 1]), torch.tensor([1, 3]))
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old[[0, 0, 2, 1]])
