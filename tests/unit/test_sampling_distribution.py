from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.sampling.distribution import Candidates
from server.engine.sampling.ranking import largest
from server.engine.sampling.request import RequestSampling, SampleRow
from server.engine.sampling.sampler import Sampler, target_probabilities
from server.messages import SamplingParams


def make_row(vocab_size: int, seed: int = 0, output: tuple[int, ...] = (), **params: Any) -> SampleRow:
    return SampleRow(RequestSampling(SamplingParams(max_tokens=9, seed=seed, **params), [0], vocab_size), output)


def reference(
    logits: list[float], temperature: float, min_p: float = 0, top_k: int = 0, top_p: float = 1
) -> list[float]:
    """Temperature, min_p, top_k, top_p in plain Python; equal tokens in order of id."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return [float(token == order[0]) for token in range(len(logits))]
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    kept = [token for token in order if weights[token] >= min_p]
    if top_k:
        kept = kept[:top_k]
    total = sum(weights[token] for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        if mass >= top_p * total and top_p < 1:
            break
        nucleus.append(token)
        mass += weights[token]
    return [weights[token] / mass if token in nucleus else 0.0 for token in range(len(logits))]


SETTINGS = {
    "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    "min_p": st.sampled_from([0.0, 0.0413, 0.31, 1.0]),
    "top_k": st.sampled_from([0, 1, 2, 7, 31, 300]),
    "top_p": st.sampled_from([1.0, 0.9123, 0.5017, 1e-6]),
}


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1), st.sampled_from([32, 200]), st.fixed_dictionaries(SETTINGS))
def test_equals_the_reference(seed: int, vocab_size: int, params: dict[str, Any]) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    found = target_probabilities(logits[None], [make_row(vocab_size, **params)])[0]
    assert found.sum().item() == pytest.approx(1, abs=1e-12)
    assert found.tolist() == pytest.approx(reference(logits.tolist(), **params), rel=1e-5, abs=1e-6)


@given(st.lists(st.integers(-2, 2), min_size=5, max_size=100), st.integers(1, 5), st.sampled_from([0.3, 0.9, 1.0]))
def test_ties_go_to_the_lower_id(levels: list[int], top_k: int, top_p: float) -> None:
    logits = torch.tensor([levels], dtype=torch.bfloat16)
    found = target_probabilities(logits, [make_row(len(levels), top_k=top_k, top_p=top_p)])
    top_k = top_k if top_k < len(levels) else 0
    assert found[0].tolist() == pytest.approx(reference(levels, 1.0, 0, top_k, top_p), rel=1e-5, abs=1e-9)
    greedy = target_probabilities(logits, [make_row(len(levels), temperature=0.0)])
    assert greedy[0].tolist() == reference(levels, 0)


@pytest.mark.parametrize("vocab_size", [64 * 40, 64 * 40 + 5])
@pytest.mark.parametrize("count", [1, 3, 50])
def test_largest_equals_a_stable_sort(vocab_size: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    values = torch.randint(-40, 3, (6, vocab_size), generator=generator).float()
    values[1] = -0.0
    values[1, 5::7] = 0.0
    values[2] = float("-inf")
    values[3, 7:] = float("-inf")
    found, ids = largest(values, count)
    expected, expected_ids = values.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, expected_ids[:, :count])
    assert torch.equal(found, expected[:, :count])


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.05, 0.9, 0.999, 1 - 1e-12])
def test_the_tail_left_out_before_the_sort_is_never_in_the_nucleus(scale: float, top_p: float) -> None:
    """Flat and peaked rows in one batch, against a full sort."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * torch.tensor([[scale], [1.0], [9.0]])
    rows = [make_row(5000, top_p=top_p, min_p=min_p) for min_p in (0.0, 0.0, 1e-3)]
    found = target_probabilities(logits, rows)
    scores = torch.exp(logits - logits.amax(-1, keepdim=True))
    scores[2].masked_fill_(scores[2] < 1e-3, 0)
    ordered, ids = (scores * 2.0**44).long().sort(dim=-1, descending=True, stable=True)
    total = ordered.sum(-1, keepdim=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < (total.double() * top_p).ceil())
    expected = torch.zeros_like(found).scatter(1, ids, kept / kept.sum(-1, keepdim=True).double())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", [{"temperature": 1e-6}, {"temperature": 1e-4}, {"top_p": 1e-6}, {"top_k": 1}])
def test_extremes_equal_greedy(dtype: torch.dtype, params: dict[str, Any]) -> None:
    logits = (torch.randn(8, 1000, generator=torch.Generator().manual_seed(2)) * 30).to(dtype)
    logits[:4, ::50] = logits[:4].amax(-1, keepdim=True) if params != {"temperature": 1e-4} else -1
    rows = [make_row(1000, seed=seed, **params) for seed in range(8)]
    best = logits.float().argmax(-1)
    assert torch.equal(Sampler()(logits, rows).token_ids, best)
    assert torch.equal(target_probabilities(logits, rows).argmax(-1), best)


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}])
def test_rows_without_any_finite_logit_stay_sane(params: dict[str, Any]) -> None:
    logits = torch.full((2, 300), float("-inf"))
    logits[1, 77] = -3e38
    rows = [make_row(300, **params)] * 2
    probabilities = target_probabilities(logits, rows)
    assert probabilities.sum(-1).tolist() == [1.0, 1.0]
    assert probabilities[1, 77] == 1
    drawn = Sampler()(logits, rows).token_ids
    assert drawn[1] == 77
    assert probabilities[0, drawn[0]] == 1


def test_draw_covers_the_ends_of_the_unit_interval() -> None:
    weights = torch.tensor([[0, 3, 0, 1, 0]]).expand(5, -1)
    uniforms = torch.tensor([0.0, 0.5, 0.75, 0.7499999, 1 - 2.0**-53], dtype=torch.float64)
    assert Candidates(weights, None).draw(uniforms).tolist() == [1, 1, 3, 1, 3]
    with pytest.raises(ValueError, match="random number"):
        Candidates(weights, None).draw(None)


@given(st.integers(1, 2**63 - 1) | st.integers(0, 62).map(lambda bit: 2**bit) | st.integers(2**61, 2**61 + 2**12))
def test_the_largest_uniform_stays_below_any_sum(total: int) -> None:
    uniforms = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert Candidates(torch.tensor([[total, 0]]), None).draw(uniforms).tolist() == [0]


def test_a_neighbours_top_p_does_not_touch_the_last_token() -> None:
    """600 weights of 2**44 and one of 1 have a sum that float64 cannot hold."""
    logits = torch.full((2, 1000), -200.0)
    logits[:, :600] = 0
    logits[:, 600] = -30.2
    rows = [make_row(1000, top_k=700), make_row(1000, top_k=700, top_p=0.5)]
    alone = target_probabilities(logits[:1], rows[:1])[0]
    assert 0 < alone[600] < 1e-16
    assert torch.equal(target_probabilities(logits, rows)[0], alone)
