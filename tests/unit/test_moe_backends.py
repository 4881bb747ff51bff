"""The MoE backends against the definition, and against each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from server.engine.moe.base import ExpertWeights, MoENeed
from server.engine.moe.registry import MOE_BACKENDS

CPU = torch.device("cpu")


def need(dtype: torch.dtype, experts: int, top_k: int, hidden: int, width: int, device: torch.device = CPU) -> MoENeed:
    return MoENeed(device, dtype, experts, top_k, hidden, width)


PLAIN = [name for name, cls in MOE_BACKENDS.items() if cls.supports(need(torch.float32, 8, 2, 32, 32)) is None]
"""Those that take unquantised experts."""


def definition(x: Tensor, weights: ExpertWeights, ids: Tensor, scores: Tensor) -> Tensor:
    """Token by token in fp64."""
    rows = []
    for token, experts, row_scores in zip(x.double(), ids, scores.double(), strict=True):
        total = torch.zeros_like(token)
        for expert, score in zip(experts.tolist(), row_scores, strict=True):
            gate, up = (weights.w13[expert].double() @ token).chunk(2)
            total += score * (weights.w2[expert].double() @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows) if rows else x.double()


def case(
    seed: int, tokens: int, experts: int, top_k: int, dtype: torch.dtype, used: int
) -> tuple[Tensor, ExpertWeights, Tensor, Tensor]:
    """Random inputs of which only the first `used` experts receive tokens."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width = 32, 24

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weights = ExpertWeights(noise(experts, 2 * width, hidden) / 6, noise(experts, hidden, width) / 5)
    ids = torch.rand(tokens, used, generator=generator).argsort(-1)[:, :top_k]
    return noise(tokens, hidden), weights, ids, torch.rand(tokens, top_k, generator=generator)


@pytest.mark.parametrize("name", PLAIN)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_equals_the_definition(name: str, data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 9), "experts")
    used = data.draw(st.integers(1, experts), "used experts")
    top_k = data.draw(st.integers(1, used), "top k")
    tokens = data.draw(st.integers(0, 12), "tokens")
    x, weights, ids, scores = case(data.draw(st.integers(0, 999)), tokens, experts, top_k, torch.float32, used)
    backend = MOE_BACKENDS[name](need(torch.float32, experts, top_k, 32, 24))
    got = backend.forward(x, backend.pack(weights), ids, scores)
    assert got.dtype is x.dtype
    torch.testing.assert_close(got.double(), definition(x, weights, ids, scores), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_half_precision_with_empty_experts(name: str, dtype: torch.dtype, tokens: int) -> None:
    x, weights, ids, scores = case(5, tokens, 16, 2, dtype, used=3)
    backend = MOE_BACKENDS[name](need(dtype, 16, 2, 32, 24))
    got = backend.forward(x, backend.pack(weights), ids, scores)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), definition(x, weights, ids, scores), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", PLAIN)
def test_a_token_does_not_depend_on_its_neighbours(name: str) -> None:
    x, weights, ids, scores = case(6, 20, 6, 2, torch.float32, used=6)
    backend = MOE_BACKENDS[name](need(torch.float32, 6, 2, 32, 24))
    packed = backend.pack(weights)
    together = backend.forward(x, packed, ids, scores)
    alone = torch.cat([backend.forward(x[i : i + 1], packed, ids[i : i + 1], scores[i : i + 1]) for i in range(20)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PLAIN)
def test_on_cuda(name: str) -> None:
    x, weights, ids, scores = case(7, 50, 16, 3, torch.bfloat16, used=5)
    cuda = torch.device("cuda")
    backend = MOE_BACKENDS[name](need(torch.bfloat16, 16, 3, 32, 24, cuda))
    packed = backend.pack(ExpertWeights(weights.w13.to(cuda), weights.w2.to(cuda)))
    got = backend.forward(x.to(cuda), packed, ids.to(cuda), scores.to(cuda))
    torch.testing.assert_close(got.cpu().double(), definition(x, weights, ids, scores), atol=0.05, rtol=0.05)
