"""Linear layers: where checkpoint tensors land, and what packing changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from layer_context import context

from server.engine.layers.embedding import VocabEmbedding
from server.engine.layers.linear import Linear, column_parallel, row_parallel
from server.engine.parallel import ParallelGroup


def filled(linear: Linear, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = linear.weight_targets("p.")
    values = {name: torch.randn(target.shape, generator=generator) for name, target in targets.items()}
    for name, target in targets.items():
        target.copy_(values[name])
    return values


def test_shards_fill_their_rows_in_order() -> None:
    linear = Linear(8, {"q": 6, "k": 2, "v": 4}, context(), bias=True)
    values = filled(linear)
    assert list(values) == ["p.q.weight", "p.k.weight", "p.v.weight", "p.q.bias", "p.k.bias", "p.v.bias"]
    x = torch.randn(5, 8)
    expected = torch.cat([F.linear(x, values[f"p.{s}.weight"], values[f"p.{s}.bias"]) for s in "qkv"], -1)
    torch.testing.assert_close(linear(x), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_packed_weights_give_the_same_products_and_replace_the_plain_ones(bias: bool, rows: int) -> None:
    linear = Linear(96, {"a": 70, "b": 33}, context(torch.bfloat16), bias=bias)
    filled(linear)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = linear(x).float()
    linear.finish_loading()
    assert (linear.packed is None) != (linear.weight is None)
    torch.testing.assert_close(linear(x).float(), plain, atol=0.13, rtol=0.02)


def test_packing_leaves_fp32_and_shared_memory_alone() -> None:
    linear = Linear(8, {"a": 4}, context())
    values = filled(linear)
    linear.finish_loading()
    assert linear.weight is not None
    torch.testing.assert_close(linear.weight.data, values["p.a.weight"])
    shared = VocabEmbedding(32, 16, context(torch.bfloat16))
    shared.weight.fill_(0.5)
    tied = Linear(16, {"lm_head": 32}, context(torch.bfloat16), tied=shared)
    tied.finish_loading()
    assert torch.equal(tied(torch.ones(1, 16).bfloat16()), torch.full((1, 32), 8.0).bfloat16())
    assert float(shared.weight.sum()) == 256.0


def test_ranks_hold_their_share() -> None:
    ranks = context(group=ParallelGroup(rank=1, size=2))
    column = column_parallel(8, {"gate_proj": 6, "up_proj": 6}, ranks)
    assert [tuple(t.shape) for t in column.weight_targets("").values()] == [(3, 8), (3, 8)]
    assert row_parallel(6, "down_proj", 8, ranks).weight_targets("")["down_proj.weight"].shape == (8, 3)
    with pytest.raises(ValueError, match="gate_proj = 5 cannot be split over 2 ranks"):
        column_parallel(8, {"gate_proj": 5}, ranks)
