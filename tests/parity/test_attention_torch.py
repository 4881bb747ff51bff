"""TorchAttention, the reference of the other backends, against attention by its definition in fp64."""

from __future__ import annotations

import pytest
import torch
from attention_batches import LAYERS, MIXED, Geometry, assert_attention, make_case, run
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.attention.torch import TorchAttention

CPU = torch.device("cpu")
torch.set_num_threads(1)

ROWS = st.lists(
    st.one_of(
        st.tuples(st.just(0), st.integers(1, 60)),
        st.tuples(st.integers(1, 100), st.integers(1, 60)),
        st.tuples(st.integers(1, 300), st.just(1)),
        st.tuples(st.integers(1, 300), st.integers(2, 9)),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=30, deadline=None)
@given(
    rows=ROWS,
    group=st.sampled_from([1, 3, 4, 8]),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 16, 64, 80]),
    page_size=st.sampled_from([16, 32, 48, 128]),
    pages=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_any_batch_agrees_with_the_definition(
    rows: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    pages: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    geometry = Geometry(group * kv_heads, kv_heads, head_dim, page_size * pages, page_size)
    case = make_case(geometry, rows, seed=seed, dtype=dtype)
    # 50: a finite remainder of another request; a weight that is not exactly zero would show.
    assert_attention(run(TorchAttention(geometry.need(CPU, dtype), LAYERS), case, unused=50.0), case.expected())


@pytest.mark.parametrize("rows", [MIXED, ((40, 1), (60, 1)), ((15, 1), (31, 1))], ids=["mixed", "decodes", "full"])
def test_step_shapes(rows: tuple[tuple[int, int], ...]) -> None:
    geometry = Geometry()
    case = make_case(geometry, rows, seed=3)
    backend = TorchAttention(geometry.need(CPU, torch.float32), LAYERS)
    assert_attention(run(backend, case, unused=50.0), case.expected())
