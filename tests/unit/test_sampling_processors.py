from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server.engine.sampling.processors import apply_processors
from server.engine.sampling.request import RequestSampling, SampleRow
from server.messages import SamplingParams

V = 16
IDS = st.integers(0, V - 1)
HISTORY = st.lists(IDS, max_size=10)
LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=V, max_size=V)


def make_row(prompt: list[int], output: list[int], draft: list[int] | None = None, **params: Any) -> SampleRow:
    request = RequestSampling(SamplingParams(**{"max_tokens": 50, "seed": 0, **params}), prompt, V)
    return SampleRow(request, output, draft or [])


def processed(logits: list[float], row: SampleRow) -> list[float]:
    tensor = torch.tensor([logits], dtype=torch.float32)
    apply_processors(tensor, [row])
    return tensor[0].tolist()


def reference(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """One token at a time, in plain Python."""
    banned = {token for token, bias in params.logit_bias.items() if bias <= -100}
    for *before, last in params.bad_words:
        if output[len(output) - len(before) :] == before and len(output) >= len(before):
            banned.add(last)
    if len(output) < params.min_tokens:
        banned |= {token for token in params.stop_token_ids if token < V}
    allowed = set(range(V)) if params.allowed_token_ids is None else set(params.allowed_token_ids)
    if not allowed - banned:
        banned = set()
    result = []
    for token, logit in enumerate(logits):
        if token in banned or token not in allowed:
            result.append(-math.inf)
            continue
        bias = params.logit_bias.get(token, 0)
        value = logit + (bias if bias > -100 else 0)
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        result.append(value)
    return result


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    seed=st.just(0),
    min_tokens=st.sampled_from([0, 3, 50]),
    stop_token_ids=st.lists(st.integers(0, V + 3), max_size=3).map(tuple),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(IDS, st.sampled_from([-100.0, -99.0, -1.5, 0.0, 2.0, 100.0]), max_size=5),
    bad_words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    allowed_token_ids=st.none() | st.lists(IDS, min_size=1, max_size=8).map(tuple),
)


@given(LOGITS, PARAMS, HISTORY, st.lists(st.integers(0, 3), max_size=10), st.lists(st.integers(0, 3), max_size=3))
def test_all_together_equal_the_reference(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], draft: list[int]
) -> None:
    row = SampleRow(RequestSampling(params, prompt, V), output, draft)
    expected = reference(logits, params, prompt, output + draft)
    assert processed(logits, row) == pytest.approx(expected, rel=1e-5, abs=1e-4)
    if not row.request.edited(row.position):
        assert expected == logits


@given(st.lists(st.tuples(LOGITS, PARAMS, HISTORY, HISTORY), min_size=2, max_size=6))
def test_rows_do_not_touch_each_other(rows: list[tuple[list[float], SamplingParams, list[int], list[int]]]) -> None:
    batch = [SampleRow(RequestSampling(params, prompt, V), output) for _, params, prompt, output in rows]
    together = torch.tensor([logits for logits, *_ in rows], dtype=torch.float32)
    apply_processors(together, batch)
    alone = [processed(logits, row) for (logits, *_), row in zip(rows, batch, strict=True)]
    assert together.tolist() == alone


FLAT = [1.0] * V


def banned_by(row: SampleRow) -> set[int]:
    return {token for token, value in enumerate(processed(FLAT, row)) if value == -math.inf}


def test_min_tokens_counts_output_and_draft() -> None:
    params = {"min_tokens": 3, "stop_token_ids": (2, 9, V, 2**20)}
    assert banned_by(make_row([1], [4, 4], **params)) == {2, 9}
    assert banned_by(make_row([1], [4], [4], **params)) == {2, 9}
    assert banned_by(make_row([1], [4, 4], [4], **params)) == set()
    assert banned_by(make_row([1], [4, 4, 4], **params)) == set()


def test_bad_words_need_their_beginning_just_generated() -> None:
    words = {"bad_words": ((5,), (1, 2, 3), (2, 4))}
    assert banned_by(make_row([1, 2], [], **words)) == {5}
    assert banned_by(make_row([], [1, 2], **words)) == {5, 3, 4}
    assert banned_by(make_row([], [1], [2], **words)) == {5, 3, 4}
    assert banned_by(make_row([], [1, 2, 0], **words)) == {5}
    assert banned_by(make_row([], [0, 2], **words)) == {5, 4}


def test_a_bias_of_minus_100_bans_and_any_other_is_added() -> None:
    logits = [200.0, *FLAT[1:]]
    found = processed(logits, make_row([], [], logit_bias={0: -100.0, 1: 100.0, 2: -99.5, 3: -5000.0}))
    assert found[:4] == [-math.inf, 101.0, -98.5, -math.inf]


def test_contradictory_bans_give_way() -> None:
    everything = dict.fromkeys(range(V), -100.0)
    assert banned_by(make_row([], [], logit_bias=everything)) == set()
    only_stop = make_row([], [], min_tokens=5, stop_token_ids=(3,), allowed_token_ids=(3,))
    assert banned_by(only_stop) == set(range(V)) - {3}


def test_allowed_ids_outside_the_vocabulary_are_an_error() -> None:
    with pytest.raises(ValueError, match="allowed_token_ids"):
        make_row([], [], allowed_token_ids=(V, V + 1))
    assert banned_by(make_row([], [], allowed_token_ids=(V, 2))) == set(range(V)) - {2}
