from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from server.engine.sampling.logprobs import token_logprobs
from server.engine.sampling.request import RequestSampling, SampleRow
from server.engine.sampling.sampler import Sampler, target_probabilities
from server.messages import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

V = 3003
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "min_p": 0.01},
    {"top_p": 0.8},
    {"top_p": 0.95, "min_p": 0.001, "temperature": 1.3},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 2000},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.3},
    {"logit_bias": {3: 4.0, 5: -100.0}, "presence_penalty": 1.0},
    {"min_tokens": 9, "stop_token_ids": (0, 4), "bad_words": ((1,), (7, 3))},
    {"allowed_token_ids": (1, 2, 3, 30)},
]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Any operation that makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batch(dtype: torch.dtype) -> tuple[torch.Tensor, list[SampleRow]]:
    logits = (torch.randn(len(KINDS) * 3, V, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    rows = [
        SampleRow(RequestSampling(SamplingParams(max_tokens=9, seed=i, **KINDS[i % len(KINDS)]), [8, 9], V), [7, 7])
        for i in range(len(logits))
    ]
    return logits, rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_equals_cpu(dtype: torch.dtype) -> None:
    logits, rows = batch(dtype)
    expected = target_probabilities(logits, rows)
    found = target_probabilities(logits.cuda(), rows).cpu()
    # The devices' exp differ in the last bit, and so may the last token of a nucleus.
    assert ((found - expected).abs() > 1e-6).sum() <= 2
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    same = Sampler()(logits.cuda(), rows).token_ids.cpu() == Sampler()(logits, rows).token_ids
    assert same.sum() >= len(rows) - 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_never_waits() -> None:
    logits, rows = batch(torch.bfloat16)
    logits = logits.cuda()
    with no_synchronisation():
        token_ids = Sampler()(logits, rows).token_ids
        probabilities = target_probabilities(logits, rows)
    assert (probabilities.gather(1, token_ids[:, None]) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_in_any_batch_on_cuda(dtype: torch.dtype) -> None:
    logits, rows = batch(dtype)
    logits = logits.cuda()
    together = target_probabilities(logits, rows)
    drawn = Sampler()(logits, rows).token_ids
    for i, row in enumerate(rows):
        assert torch.equal(target_probabilities(logits[i : i + 1], [row])[0], together[i])
        assert Sampler()(logits[i : i + 1], [row]).token_ids[0] == drawn[i]


def test_logprobs_on_cuda() -> None:
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(2))
    for ours, theirs in zip(
        token_logprobs(logits.cuda(), list(range(5)), 4), token_logprobs(logits, list(range(5)), 4), strict=True
    ):
        assert (ours.rank, ours.top_ids) == (theirs.rank, theirs.top_ids)
        assert [ours.logprob, *ours.top_logprobs] == pytest.approx([theirs.logprob, *theirs.top_logprobs], abs=1e-5)
