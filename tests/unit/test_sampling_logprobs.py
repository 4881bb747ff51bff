from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server.engine.sampling import logprobs
from server.engine.sampling.logprobs import LOWEST, token_logprobs


@given(
    st.lists(st.lists(st.integers(-3, 3).map(float) | st.just(-math.inf), min_size=8, max_size=8), max_size=5),
    st.integers(0, 12),
    st.integers(0, 7),
)
def test_equals_the_reference(rows: list[list[float]], top: int, token: int) -> None:
    rows = [[*row[:7], 1.0] for row in rows]
    found = token_logprobs(torch.tensor(rows).view(-1, 8), [token] * len(rows), top)
    for row, one in zip(rows, found, strict=True):
        norm = math.log(sum(math.exp(value) for value in row))
        order = sorted(range(8), key=lambda i: (-row[i], i))
        expected = [max(value - norm, LOWEST) for value in row]
        assert one.logprob == pytest.approx(expected[token], abs=1e-5)
        assert one.rank == order.index(token) + 1
        assert one.top_ids == order[:top]
        assert one.top_logprobs == pytest.approx([expected[i] for i in order[:top]], abs=1e-5)
        json.dumps([one.logprob, one.top_logprobs], allow_nan=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (torch.randn(7, 3001, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    ids = list(range(7))
    whole = token_logprobs(logits, ids, 5)
    assert [token_logprobs(logits[i : i + 1], [i], 5)[0] for i in range(7)] == whole
    monkeypatch.setattr(logprobs, "_CHUNK", 3 * 3001)
    assert token_logprobs(logits, ids, 5) == whole


@pytest.mark.parametrize("bad", [[-math.inf] * 6, [math.nan] * 6, [-3e38, 3e38, 0, 0, 0, 0], [-20000.0, 0, 0, 0, 0, 0]])
def test_always_finite(bad: list[float]) -> None:
    (one,) = token_logprobs(torch.tensor([bad]), [0], 3)
    assert one.logprob == LOWEST
    assert all(math.isfinite(value) for value in one.top_logprobs)
    assert len(one.top_ids) == 3
