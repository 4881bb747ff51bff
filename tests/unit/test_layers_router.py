"""Routing by the definition, token by token."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_context import context

from server.engine.layers.router import SigmoidRouter, SoftmaxRouter


@given(st.integers(0, 999), st.integers(1, 4), st.booleans())
@settings(max_examples=30, deadline=None)
def test_softmax(seed: int, top_k: int, renormalize: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    router = SoftmaxRouter(8, 5, top_k, context(), renormalize=renormalize)
    router.weight.copy_(torch.randn(5, 8, generator=generator))
    x = torch.randn(6, 8, generator=generator)
    ids, weights = router(x)
    for token, row_ids, row_weights in zip(x, ids.tolist(), weights.tolist(), strict=True):
        exp = [math.exp(value) for value in (router.weight @ token).tolist()]
        best = sorted(range(5), key=lambda expert: -exp[expert])[:top_k]
        assert row_ids == best
        total = sum(exp[expert] for expert in best) if renormalize else sum(exp)
        for weight, expert in zip(row_weights, best, strict=True):
            assert math.isclose(weight, exp[expert] / total, rel_tol=1e-4)


@given(st.integers(0, 999), st.sampled_from([(1, 1), (2, 1), (3, 2), (3, 3)]), st.integers(1, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_sigmoid(seed: int, groups: tuple[int, int], top_k: int, renormalize: bool) -> None:
    num_groups, kept = groups
    generator = torch.Generator().manual_seed(seed)
    router = SigmoidRouter(
        8,
        12,
        top_k,
        context(torch.bfloat16),
        renormalize=renormalize,
        scaling_factor=2.5,
        num_groups=num_groups,
        topk_groups=kept,
    )
    router.weight.copy_(torch.randn(12, 8, generator=generator))
    router.bias.copy_(torch.randn(12, generator=generator))
    x = torch.randn(6, 8, generator=generator).bfloat16()
    ids, weights = router(x)
    assert weights.dtype is torch.float32
    size = 12 // num_groups
    for token, row_ids, row_weights in zip(x, ids.tolist(), weights.tolist(), strict=True):
        scores = [1 / (1 + math.exp(-value)) for value in (router.weight @ token.float()).tolist()]
        biased = [score + bias for score, bias in zip(scores, router.bias.tolist(), strict=True)]
        strength = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
        open_groups = sorted(range(num_groups), key=lambda g: -strength[g])[:kept]
        open_experts = [expert for expert in range(12) if expert // size in open_groups]
        best = sorted(open_experts, key=lambda expert: -biased[expert])[:top_k]
        assert sorted(row_ids) == sorted(best)
        total = sum(scores[expert] for expert in best) if renormalize else 1.0
        for weight, expert in zip(row_weights, row_ids, strict=True):
            assert math.isclose(weight, 2.5 * scores[expert] / total, rel_tol=1e-4)
