"""Uniform steps, split keys and fused rotation of the Triton attention backend, in triton's interpreter."""

from __future__ import annotations

import math
import os
import secrets

import pytest
import torch
from attention_batches import LAYER, LAYERS, Geometry, assert_attention, make_case, memory_full_of_nan, run

from server.engine.attention.base import CapturableAttention, StepMetadata, UniformStep
from server.engine.attention.triton import TritonAttention
from server.engine.attention.triton_plan import TritonPlan, num_parts, tile_shapes

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


class Uniform(TritonAttention):
    """Plans steps as a graph would: from tensors alone, over wider tables than needed."""

    def plan(self, step: StepMetadata) -> TritonPlan:
        query_len = step.query_start[1]
        assert step.query_start == list(range(0, len(step.seq_lens) * query_len + 1, query_len))
        tables = torch.nn.functional.pad(step.block_tables, (0, 3), value=0)
        lengths = torch.tensor(step.seq_lens, dtype=torch.int32, device=tables.device)
        longest = max(step.seq_lens) + 40
        return self.plan_uniform(UniformStep(query_len, longest, lengths, tables, step.slot_mapping))


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize(
    "geometry", [Geometry(4, 2, 16, 16, 16), Geometry(8, 1, 32, 64, 64), Geometry(6, 2, 80, 128, 128)], ids=str
)
def test_uniform_steps_agree_with_the_definition(geometry: Geometry, query_len: int, seed: int) -> None:
    rows = [(past, query_len) for past in (0, 63, 64, 130, 200)]
    case = make_case(geometry, rows, seed=seed)
    backend = Uniform(geometry.need(CPU, torch.float32), LAYERS)
    assert_attention(run(backend, case, unused=math.nan), case.expected())
    assert backend.plan(case.step).rows[0].parts > 1


def test_many_rows_are_not_split(seed: int) -> None:
    geometry = Geometry(2, 2, 16)
    case = make_case(geometry, [(i % 7, 1) for i in range(140)], seed=seed)
    backend = Uniform(geometry.need(CPU, torch.float32), LAYERS)
    assert_attention(run(backend, case, unused=math.nan), case.expected())


@pytest.mark.parametrize("rows", [3, 140], ids=["split", "whole"])
def test_rows_of_padding_are_zero_and_store_nothing(rows: int, seed: int) -> None:
    geometry = Geometry(2, 1, 16)
    case = make_case(geometry, [(20, 2)] * rows, seed=seed)
    case.step.seq_lens[1] = 0
    case.step.slot_mapping[2:4] = -1
    backend = Uniform(geometry.need(CPU, torch.float32), LAYERS)
    backend.allocate(case.num_pages, geometry.page_size)
    assert backend.cache is not None
    cache = backend.cache.keys[LAYER].flatten(0, 1), backend.cache.values[LAYER].flatten(0, 1)
    for tensor in cache:
        tensor.fill_(math.nan)
    for slots, keys, values in case.pasts:
        cache[0][slots], cache[1][slots] = keys, values
    unused = backend.cache.keys[LAYER].isnan().all(-1).sum()
    with memory_full_of_nan(CPU):
        got = backend.forward(case.q, case.k, case.v, LAYER, backend.plan(case.step))
    assert unused - backend.cache.keys[LAYER].isnan().all(-1).sum() == 2 * (rows - 1)
    assert (got[2:4] == 0).all()
    kept = torch.arange(2 * rows) // 2 != 1
    assert_attention(got[kept], case.expected()[kept])


def test_what_a_uniform_step_refuses() -> None:
    geometry = Geometry(8, 2, 16)
    case = make_case(geometry, [(20, 9)], seed=0)
    backend = Uniform(geometry.need(CPU, torch.float32), LAYERS)
    with pytest.raises(ValueError, match="before the KV cache was allocated"):
        backend.plan(case.step)
    backend.allocate(case.num_pages, geometry.page_size)
    assert isinstance(backend, CapturableAttention) and backend.longest_query() == 8
    with pytest.raises(ValueError, match=r"9 new tokens a row \(at most 8\)"):
        backend.plan(case.step)


def test_parts_of_keys() -> None:
    shapes = tile_shapes(Geometry(32, 8, 128).need(CPU, torch.bfloat16))
    assert num_parts(1, 8, 100_000, shapes) == 32
    assert num_parts(1, 8, 64, shapes) == 1
    assert num_parts(8, 8, 100_000, shapes) == 5
    assert num_parts(32, 8, 100_000, shapes) == 3
    assert num_parts(33, 8, 100_000, shapes) == 1
