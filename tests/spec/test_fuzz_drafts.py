"""The product of all sampling fields, drawn at random and run side by side with drafts: nothing fails, and whatever is
greedy, or seeded under greedy drafts, is what plain decoding answers. More: `pytest -m slow`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.spec.drafts import Pair
from tests.spec.engine_harness import Harness, make_engine
from tests.spec.tiny_models import VOCAB_SIZE

ENGINES: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 5, "prompt_lookup_min": 1},
    "self": {"num_speculative_tokens": 8},
    "noisy": {"num_speculative_tokens": 3, "adaptive_k": True},
    "independent": {"num_speculative_tokens": 2, "draft_sample_method": "probabilistic"},
    "eagle3": {"num_speculative_tokens": 4, "draft_sample_method": "probabilistic", "max_model_len": 90},
    "mtp": {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 5, 1], [6, 99, 0]]},
}
LIMIT = 120
REQUESTS = 12
"""Drawn and run together."""

tokens = st.integers(0, VOCAB_SIZE - 1)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=70),
    # With repetition; around a block; shared between requests.
    st.tuples(st.lists(tokens, min_size=1, max_size=5), st.integers(1, 17)).map(lambda drawn: drawn[0] * drawn[1]),
    st.integers(14, 34).map(lambda length: list(range(length))),
)
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 1e-6, 0.3, 0.8, 1.0, 2.0]),
    "min_tokens": st.integers(0, 30),
    "top_k": st.sampled_from([0, 1, 2, 30, 259, 260, 10**6]),
    "top_p": st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
    "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
    "frequency_penalty": st.sampled_from([-2.0, 0.1, 2.0]),
    "repetition_penalty": st.sampled_from([1e-5, 0.7, 1.3, 10.0]),
    "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, -5.0, 3.0, 100.0]), max_size=8)
    | st.just(dict.fromkeys(range(VOCAB_SIZE), -100.0)),
    "bad_words": st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    "allowed_token_ids": st.lists(tokens, min_size=1, max_size=20).map(tuple),
    "stop_token_ids": st.lists(tokens, max_size=30).map(tuple),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 3),
    "most_drafted": st.sampled_from([None, 0, 1, 2]),
    "cache_salt": st.sampled_from(["", "x"]),
    "priority": st.integers(-1, 1),
}


@st.composite
def drawn_params(draw: st.DrawFn) -> dict[str, Any]:
    """A few fields each: all at once leave little of each other's effect."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONAL)), max_size=5, unique=True))
    chosen = {name: draw(OPTIONAL[name]) for name in names}
    seed = draw(st.sampled_from([-(2**63), -1, 0, 42, 2**63 - 1]))
    return {"max_tokens": draw(st.sampled_from([25, 30, 20, 40, 2, 1, 0])), "seed": seed, **chosen}


requests = st.tuples(prompts, drawn_params())


def engine_of(pair: Pair, draft: str) -> Harness:
    """Few blocks and small steps: requests are cut into chunks and drive each other out."""
    shape = {"num_kv_blocks": 16, "max_num_batched_tokens": 40, "max_model_len": LIMIT, "max_num_seqs": 5}
    return make_engine(pair.target, pair.speculative | ENGINES[draft], scheduling_policy="priority", **shape)


@pytest.fixture(scope="module")
def engines(pairs: dict[str, Pair]) -> dict[str, Harness]:
    return {draft: engine_of(pairs[draft], draft) for draft in ENGINES}


@pytest.fixture(scope="module")
def plain(pairs: dict[str, Pair]) -> dict[Path, Harness]:
    """Big enough for everything at once."""
    targets = {pair.target for pair in pairs.values()}
    return {target: make_engine(target, num_kv_blocks=200, max_model_len=LIMIT) for target in targets}


@pytest.mark.parametrize("draft", ENGINES)
def test_some_requests(
    draft: str, pairs: dict[str, Pair], engines: dict[str, Harness], plain: dict[Path, Harness]
) -> None:
    fuzz(engines[draft], plain[pairs[draft].target], 3)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ENGINES)
def test_many_requests(
    draft: str, pairs: dict[str, Pair], engines: dict[str, Harness], plain: dict[Path, Harness]
) -> None:
    fuzz(engines[draft], plain[pairs[draft].target], 16)


def fuzz(engine: Harness, plain: Harness, examples: int) -> None:
    """In groups of `REQUESTS`, drawn anew."""
    drawn_drafts = bool(engine.plan.draft and engine.plan.draft.probabilistic)

    # Without shrinking: an engine remembers what it was asked before.
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(requests, min_size=REQUESTS, max_size=REQUESTS), st.integers(0, 2**32))
    def run(asked: list[tuple[list[int], dict[str, Any]]], seed: int) -> None:
        check(engine, plain, asked, random.Random(seed), drawn_drafts)

    run()


def check(
    engine: Harness,
    plain: Harness,
    asked: list[tuple[list[int], dict[str, Any]]],
    draw: random.Random,
    drawn_drafts: bool,
) -> None:
    found, wanted = [], []
    for prompt, own in asked:
        found.append(engine.add(prompt, **own))
        wanted.append(plain.add(prompt, **own))
        for _ in range(draw.choice((0, 0, 1, 4))):
            engine.step()
    engine.run()
    plain.run()
    for (prompt, own), i, j in zip(asked, found, wanted, strict=True):
        made = engine.tokens(i)
        outputs = engine.outputs[i]
        assert [output.finish_reason for output in outputs if output.finish_reason] == [engine.finish(i)]
        assert engine.finish(i) in ("stop", "length")
        assert len(made) <= min(own["max_tokens"], LIMIT - len(prompt))
        assert all(0 <= token < VOCAB_SIZE for token in made)
        assert all(output.accepted <= output.drafted for output in outputs)
        if "logprobs" in own:
            assert sum(len(output.logprobs or []) for output in outputs) == len(made)
        if own.get("temperature", 0.0) < 1e-5 or not drawn_drafts or not own.get("draft", True):
            assert (made, engine.finish(i), outputs[-1].stop_token_id) == (
                plain.tokens(j),
                plain.finish(j),
                plain.outputs[j][-1].stop_token_id,
            )
        if "prompt_logprobs" in own:
            scores = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
            assert [len(one) for one in scores] == [len(prompt)]
