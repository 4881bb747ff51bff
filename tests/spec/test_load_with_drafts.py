"""Many mixed requests, with aborts at random steps, preemptions and prefix hits: afterwards every block is accounted
for, nothing is held, and greedy answers are those of plain decoding. 2,000 requests: `pytest -m slow`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.spec.drafts import Pair
from tests.spec.engine_harness import Harness, make_engine
from tests.spec.test_run_ahead import overlapping

DRAFTS = ("ngram", "self", "noisy", "independent", "eagle3", "mtp")
LIMIT = 150


def prompts(draw: random.Random) -> list[list[int]]:
    """With shared beginnings, some of them longer than a block."""
    begins = [[draw.randrange(256) for _ in range(length)] for length in (0, 5, 16, 33, 48)]
    return [
        [*draw.choice(begins), *([draw.randrange(256) for _ in range(draw.randint(1, 6))] * draw.randint(1, 6))]
        for _ in range(12)
    ]


def expected(pair: Pair, asked: Sequence[Sequence[int]], longest: int) -> list[list[int]]:
    return make_engine(pair.target, num_kv_blocks=400).generate(asked, max_tokens=longest)


class Load:
    """Requests arriving at random, some of which are given up."""

    def __init__(self, engine: Harness, draw: random.Random, asked: list[list[int]], known: list[list[int]]) -> None:
        self.engine, self.draw, self.asked, self.known = engine, draw, asked, known
        self.live: list[int] = []
        self.aborted: set[int] = set()
        self.greedy: dict[int, tuple[int, int]] = {}
        """Request id -> which prompt, how many tokens."""

    def add(self) -> None:
        draw = self.draw
        which, count = draw.randrange(len(self.asked)), draw.choice((1, 7, 30, *[len(self.known[0])] * 3))
        params: dict[str, Any] = {"max_tokens": count, "most_drafted": None if draw.random() < 0.9 else 0}
        params["cache_salt"] = draw.choice(("", "", "x"))
        plain = draw.random() < 0.6
        if not plain:
            params |= {"temperature": 1.0, "seed": draw.randrange(9), "frequency_penalty": draw.choice((0.0, 1.0))}
            params["stop_token_ids"] = tuple(range(draw.choice((0, 30))))
            params["logprobs"] = draw.choice((None, 2))
            params["prompt_logprobs"] = draw.choice((None, None, 1))
        request_id = self.engine.add(self.asked[which], **params)
        self.live.append(request_id)
        if plain:
            self.greedy[request_id] = which, count

    def abort(self) -> None:
        chosen = self.draw.sample(self.live, min(len(self.live), self.draw.randint(1, 4)))
        self.aborted.update(i for i in chosen if not self.ended(i))
        self.engine.scheduler.abort(chosen)
        self.live = [i for i in self.live if i not in chosen and not self.ended(i)]

    def ended(self, request_id: int) -> bool:
        outputs = self.engine.outputs.get(request_id)
        return bool(outputs) and outputs[-1].finish_reason is not None

    def check(self) -> None:
        engine = self.engine
        assert engine.scheduler.running == engine.scheduler.waiting == 0
        assert engine.scheduler.kv.pool.usage == 0
        engine.scheduler.check()
        for request_id, (which, count) in self.greedy.items():
            if request_id in self.aborted:
                made = [t for output in engine.outputs.get(request_id, []) for t in output.token_ids]
                assert made == self.known[which][: len(made)]
            else:
                assert engine.tokens(request_id) == self.known[which][:count]
                assert engine.finish(request_id) == "length"
        counts = engine.counts()
        outputs = [output for own in engine.outputs.values() for output in own]
        assert sum(counts.drafted) == sum(output.drafted for output in outputs)
        assert sum(counts.accepted) == sum(output.accepted for output in outputs)


def run(draft: str, pair: Pair, number: int, *, overlap: bool = False, probabilistic: bool = False) -> None:
    draw = random.Random(draft)
    asked = prompts(draw)
    speculative: dict[str, Any] = {"num_speculative_tokens": draw.choice((3, 5))}
    if probabilistic:
        speculative["draft_sample_method"] = "probabilistic"
    shape = {"num_kv_blocks": 14, "max_num_batched_tokens": 50, "max_num_seqs": 6, "max_model_len": LIMIT}
    engine = make_engine(pair.target, pair.speculative | speculative, **shape)
    load = Load(engine, draw, asked, expected(pair, asked, 45))
    step = overlapping(engine).step if overlap else engine.step
    for _ in range(number):
        load.add()
        for _ in range(draw.choice((0, 0, 1, 1, 3))):
            step()
        if draw.random() < 0.15:
            load.abort()
    for _ in range(100_000):
        if not step():
            break
    load.check()
    if draft == "self":
        outputs = [output for i in load.greedy for output in engine.outputs.get(i, [])]
        assert all(output.accepted == output.drafted for output in outputs)
    assert engine.scheduler.preemptions > 0
    assert engine.scheduler.kv.hits > 0
    assert load.aborted


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_load(draft: str, pairs: dict[str, Pair]) -> None:
    run(draft, pairs[draft], 35)


@pytest.mark.parametrize("draft", ["self", "eagle3"])
def test_a_load_with_overlapping_steps(draft: str, pairs: dict[str, Pair]) -> None:
    run(draft, pairs[draft], 35, overlap=True)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_long_load(draft: str, overlap: bool, pairs: dict[str, Pair]) -> None:
    if overlap and draft == "ngram":
        pytest.skip("the host finds what ngram copies, so its steps never overlap")
    run(draft, pairs[draft], 170, overlap=overlap)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["noisy", "eagle3", "mtp"])
def test_a_long_load_of_drawn_drafts(draft: str, pairs: dict[str, Pair]) -> None:
    run(draft, pairs[draft], 170, probabilistic=True)
