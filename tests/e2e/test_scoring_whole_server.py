"""Log-probabilities of prompts against transformers, through chunks and the prefix cache (cases a1, a3, a4, a5)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from live_server import LiveServer
from oracle import Oracle, folder_oracle
from tiny_checkpoint import VOCAB_SIZE

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def tiny_oracle(tiny_folder: Path) -> Oracle:
    return folder_oracle(tiny_folder)


def ids_of(length: int) -> list[int]:
    return [(31 * i * i + 7 * i) % VOCAB_SIZE for i in range(length)]


def score(server: LiveServer, prompt: Any, **body: Any) -> dict[str, Any]:
    """The legacy logprobs of an echoed prompt."""
    answer = server.complete(prompt, **{"echo": True, "logprobs": 1, "max_tokens": 0, **body})
    logprobs: dict[str, Any] = answer["choices"][0]["logprobs"]
    return logprobs


def assert_scores(got: list[float | None], expected: torch.Tensor) -> None:
    assert got[0] is None
    assert torch.tensor(got[1:]).sub(expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("length", [2, 16, 17, 48, 49, 300])
def test_echoed_prompts_score_as_transformers_says(length: int, tiny_crowded: LiveServer, tiny_oracle: Oracle) -> None:
    """Steps of 48 tokens; the second time the prefix cache could answer."""
    ids = ids_of(length)
    expected = tiny_oracle.logprobs(ids)
    for _ in range(2):
        assert_scores(score(tiny_crowded, ids)["token_logprobs"], expected)
        tiny_crowded.token_ids(ids, max_tokens=1)


def test_echo_scores_the_answer_too(tiny: LiveServer, tiny_oracle: Oracle) -> None:
    ids = ids_of(40)
    body = {"echo": True, "logprobs": 3, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    choice = tiny.complete(ids, **body, ignore_eos=True)["choices"][0]
    logprobs = choice["logprobs"]
    assert_scores(logprobs["token_logprobs"], tiny_oracle.logprobs(ids + choice["token_ids"]))
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(logprobs["text_offset"]) == 48
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["top_logprobs"][0] is None
    for token, own, top in zip(
        logprobs["tokens"][1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
    ):
        assert own <= max(top.values()) + 1e-6
        assert token not in top or "\ufffd" in token or top[token] == pytest.approx(own)


@pytest.mark.parametrize("length", [1, 16, 49, 200])
def test_prompt_logprobs_have_an_entry_for_every_token(
    length: int, tiny_crowded: LiveServer, tiny_oracle: Oracle
) -> None:
    ids = ids_of(length)
    expected = tiny_oracle.logprobs(ids) if length > 1 else torch.empty(0)
    for _ in range(2):
        answer = tiny_crowded.complete(ids, prompt_logprobs=2, max_tokens=2, temperature=0)
        entries = answer["choices"][0]["prompt_logprobs"]
        assert len(entries) == answer["usage"]["prompt_tokens"] == length
        assert entries[0] is None
        for position, entry in enumerate(entries[1:], start=1):
            own = entry[str(ids[position])]
            assert abs(own["logprob"] - float(expected[position - 1])) < TOLERANCE
            assert 2 <= len(entry) <= 3
        tiny_crowded.token_ids(ids, max_tokens=1)


def test_scoring_changes_no_answer(tiny_crowded: LiveServer) -> None:
    ids = ids_of(100)
    plain = tiny_crowded.token_ids(ids, max_tokens=12, ignore_eos=True)
    assert tiny_crowded.token_ids(ids, max_tokens=12, ignore_eos=True, prompt_logprobs=1) == plain
    assert tiny_crowded.token_ids(ids, max_tokens=12, ignore_eos=True, logprobs=5) == plain


@pytest.mark.parametrize(
    "body",
    [
        {"echo": True, "logprobs": 5, "top_k": 1, "temperature": 1},
        {"logprobs": 5, "logit_bias": {str(i): -100 for i in range(0, VOCAB_SIZE, 2)}},
        {"logprobs": 20, "allowed_token_ids": [5]},
    ],
)
def test_logprobs_are_finite_or_null(body: dict[str, Any], tiny: LiveServer) -> None:
    response = tiny.post("/v1/completions", prompt="a b c", max_tokens=5, **body)
    assert response.status_code == 200

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in an answer")

    assert json.loads(response.text, parse_constant=refuse)["choices"][0]["logprobs"]["token_logprobs"]


def test_the_embedded_model_scores_text_as_transformers_does(smollm2: LiveServer, smollm2_oracle: Oracle) -> None:
    for text in ("\n7) Sam has 12", "The capital of France is Paris. Die Hauptstadt von Japan ist 東京 🙂."):
        ids = smollm2.encode(text)
        logprobs = score(smollm2, text)
        assert_scores(logprobs["token_logprobs"], smollm2_oracle.logprobs(ids))
        assert "".join(logprobs["tokens"]) == text
        lengths = [len("".join(logprobs["tokens"][:i])) for i in range(len(ids))]
        assert logprobs["text_offset"] == lengths


def test_a_refused_score_is_an_error(tiny: LiveServer) -> None:
    response: httpx.Response = tiny.post("/v1/completions", prompt="a", logprobs=21)
    assert response.status_code == 400
