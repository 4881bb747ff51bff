"""The same logits through transformers' processors and through ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from server.engine.sampling.request import RequestSampling, SampleRow
from server.engine.sampling.sampler import target_probabilities
from server.messages import SamplingParams

V = 512
PROMPT, OUTPUT = [3, 5, 5, 400], [7, 9, 7]


def theirs(logits: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    history = torch.tensor([PROMPT + OUTPUT]).expand(len(logits), -1)
    processors = LogitsProcessorList()
    if "bad_words" in params:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in params["bad_words"]]))
    if "repetition_penalty" in params:
        processors.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    if "temperature" in params:
        processors.append(TemperatureLogitsWarper(params["temperature"]))
    if "min_p" in params:
        processors.append(MinPLogitsWarper(params["min_p"]))
    if "top_k" in params:
        processors.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        processors.append(TopPLogitsWarper(params["top_p"]))
    return processors(history, logits.clone()).double().softmax(-1)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.6},
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.1},
        {"top_p": 0.93},
        {"min_p": 0.07},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7},
        {"bad_words": ((4,), (9, 7, 11), (8, 7, 12))},
        {"temperature": 0.8, "min_p": 0.02, "top_k": 30, "top_p": 0.85, "repetition_penalty": 1.2},
        {"temperature": 1.9, "top_p": 0.97, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_equals_transformers(params: dict[str, Any]) -> None:
    logits = torch.randn(20, V, generator=torch.Generator().manual_seed(3)) * 3
    rows = [SampleRow(RequestSampling(SamplingParams(max_tokens=9, seed=0, **params), PROMPT, V), OUTPUT)] * len(logits)
    ours, expected = target_probabilities(logits, rows), theirs(logits, params)
    assert torch.equal(ours > 1e-9, expected > 1e-9)
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=1e-9)
