from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from server.engine.sampling.logprobs import token_logprobs
from server.engine.sampling.request import RequestSampling, SampleRow
from server.engine.sampling.sampler import Sampler, target_probabilities
from server.messages import SamplingParams

GENERATOR_SEED = 20
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"top_p": 0.8},
    {"top_k": 6},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 0.9},
    {"top_p": 0.95, "logit_bias": {3: 4.0, 5: -100.0}},
    {"top_k": 40, "bad_words": ((1,), (2, 3))},
    {"min_tokens": 9, "stop_token_ids": (0, 4)},
    {"allowed_token_ids": (1, 2, 3, 30), "top_p": 0.7},
]


def logits_of(rows: int, vocab_size: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(GENERATOR_SEED)) * scale


def make_row(vocab_size: int, seed: int, output: list[int] | None = None, **params: Any) -> SampleRow:
    request = RequestSampling(SamplingParams(**{"max_tokens": 9, "seed": seed, **params}), [1, 2, 3], vocab_size)
    return SampleRow(request, output or [])


@pytest.mark.parametrize("params", [kind for kind in KINDS if kind.get("temperature") != 0], ids=str)
def test_samples_follow_the_distribution(params: dict[str, Any]) -> None:
    """Chi-square of 20,000 draws over positions, or fewer over seeds where the position matters to the processors."""
    vocab_size, output = 32, [7, 7, 2]
    logits = logits_of(1, vocab_size)
    one = make_row(vocab_size, 1, output, **params)
    if one.request.edited(one.position):
        rows = [make_row(vocab_size, seed, output, **params) for seed in range(4000)]
    else:
        rows = [SampleRow(one.request, range(position)) for position in range(20_000)]
    n = len(rows)
    expected = target_probabilities(logits, [one])[0] * n
    assert expected.sum().item() == pytest.approx(n)
    drawn = torch.bincount(Sampler()(logits.expand(n, -1), rows).token_ids, minlength=vocab_size)
    possible = expected > 0
    assert drawn[~possible].sum() == 0
    if int(possible.sum()) == 1:
        return
    common = expected >= 5
    observed = torch.cat([drawn[common], drawn[~common].sum()[None]]).double()
    wanted = torch.cat([expected[common], expected[~common].sum()[None]]).clamp(min=1e-9)
    observed, wanted = observed[wanted > 1], wanted[wanted > 1]
    degrees = len(wanted) - 1
    statistic = ((observed - wanted) ** 2 / wanted).sum().item()
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [32, 49152 // 16 + 3])
def test_a_row_is_the_same_alone_and_in_any_batch(dtype: torch.dtype, vocab_size: int) -> None:
    logits = logits_of(len(KINDS) * 2, vocab_size).to(dtype)
    kept = logits.clone()
    output = [7, 7, 2, 30]
    rows = [make_row(vocab_size, 5 + i, output, logprobs=i % 4, **KINDS[i % len(KINDS)]) for i in range(len(logits))]
    together = Sampler()(logits, rows)
    probabilities = target_probabilities(logits, rows)
    assert torch.equal(logits, kept)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    shuffled = Sampler()(logits[order], [rows[i] for i in order.tolist()])
    assert torch.equal(shuffled.token_ids, together.token_ids[order])
    for i, row in enumerate(rows):
        alone = Sampler()(logits[i : i + 1], [row])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]
        assert torch.equal(target_probabilities(logits[i : i + 1], [row])[0], probabilities[i])
        assert probabilities[i, together.token_ids[i]] > 0


def test_threads_change_nothing() -> None:
    logits = logits_of(8, 30_000)
    rows = [make_row(30_000, i, **kind) for i, kind in enumerate(KINDS[:6] + KINDS[:2])]
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(target_probabilities(logits, rows))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_positions_and_seeds_give_different_tokens() -> None:
    logits = torch.zeros(1, 1000)
    by_position = {int(Sampler()(logits, [make_row(1000, 42, [1] * n)]).token_ids) for n in range(50)}
    by_seed = {int(Sampler()(logits, [make_row(1000, seed)]).token_ids) for seed in range(50)}
    assert len(by_position) > 40
    assert len(by_seed) > 40


def test_a_draft_is_the_same_as_output() -> None:
    logits = logits_of(1, 64)
    params = {"frequency_penalty": 1.5, "repetition_penalty": 1.2, "bad_words": ((8, 9),), "min_tokens": 4}
    request = make_row(64, 3, stop_token_ids=(5,), **params).request
    fresh = make_row(64, 3, stop_token_ids=(5,), **params).request
    for output, draft in [([7], []), ([7], [8]), ([7], [8, 8, 9]), ([7, 8], [9]), ([7, 8, 1], []), ([7], [8])]:
        drafted = target_probabilities(logits, [SampleRow(request, output, draft)])
        appended = target_probabilities(logits, [SampleRow(fresh, output + draft)])
        anew = make_row(64, 3, output + draft, stop_token_ids=(5,), **params)
        assert torch.equal(drafted, target_probabilities(logits, [anew]))
        assert torch.equal(drafted, appended)
        assert torch.equal(
            Sampler()(logits, [SampleRow(request, output, draft)]).token_ids, Sampler()(logits, [anew]).token_ids
        )


def test_padding_rows_of_the_embedding_are_never_sampled() -> None:
    logits = torch.zeros(40, 64)
    logits[:, 50:] = 99
    rows = [make_row(50, seed, **KINDS[seed % 7]) for seed in range(40)]
    assert Sampler()(logits, rows).token_ids.max() < 50
    probabilities = target_probabilities(logits, rows)
    assert probabilities.shape == (40, 64)
    assert probabilities[:, 50:].sum() == 0


def test_no_rows() -> None:
    found = Sampler()(torch.empty(0, 32), [])
    assert found.token_ids.shape == (0,)
    assert found.logprobs == []


def test_a_bias_of_100_forces() -> None:
    logits = logits_of(20, 32)
    rows = [make_row(32, seed, logit_bias={9: 100.0}, **KINDS[seed % 7]) for seed in range(20)]
    assert Counter(Sampler()(logits, rows).token_ids.tolist()) == {9: 20}


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = logits_of(2, 32)
    rows = [make_row(32, 1, logprobs=2, temperature=0.3, logit_bias={4: 100.0}), make_row(32, 1, logprobs=None)]
    found = Sampler()(logits, rows)
    assert found.token_ids[0] == 4
    assert found.logprobs == [*token_logprobs(logits[:1], [4], 2), None]
