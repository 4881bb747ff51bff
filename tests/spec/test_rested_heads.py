"""A head that rests and catches up drafts what it would have drafted without the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.engine.models.draft import TargetHidden
from server.engine.request import Draft
from server.engine.step import DraftRow
from tests.spec.drafts import Pair
from tests.spec.engine_harness import Harness, make_engine

PROMPTS = [[5, 17, 42, 9, 63, 5, 17], [88, 21, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]]
Drafts = dict[tuple[int, int], tuple[int, ...]]
"""(request, its length) -> what was drafted."""


def watched(pair: Pair, rests: Iterator[bool], **settings: int) -> tuple[Harness, Drafts]:
    """An engine whose head rests when the iterator says so."""
    speculative = pair.speculative | {"num_speculative_tokens": 3, "adaptive_k": False}
    engine = make_engine(pair.target, speculative, **settings)
    assert engine.built.draft is not None
    speculator = engine.built.draft.speculator
    propose, made = speculator.proposer.propose, Drafts()

    def noting(rows: list[DraftRow], hidden: TargetHidden) -> list[Draft]:
        drafts = propose(rows, hidden)
        for row, draft in zip(rows, drafts, strict=True):
            if draft.token_ids:
                made[row.request.request_id, len(row.request.tokens)] = draft.token_ids
        return drafts

    speculator.proposer.propose = noting  # type: ignore[assignment,method-assign]
    speculator._length.most = lambda running: 0 if next(rests) else 3  # type: ignore[method-assign]
    return engine, made


def always() -> Iterator[bool]:
    while True:
        yield False


def now_and_then(rest: int, work: int) -> Iterator[bool]:
    while True:
        yield from [True] * rest
        yield from [False] * work


@pytest.mark.parametrize("draft", ["eagle3", "mtp", "self", "ngram"])
@pytest.mark.parametrize(("rest", "work"), [(1, 1), (5, 2), (20, 3)])
def test_drafts_after_a_rest(draft: str, rest: int, work: int, pairs: dict[str, Pair]) -> None:
    engine, reference = watched(pairs[draft], always())
    texts = engine.generate(PROMPTS, max_tokens=48)
    resting, made = watched(pairs[draft], now_and_then(rest, work))
    assert resting.generate(PROMPTS, max_tokens=48) == texts
    common = made.keys() & reference.keys()
    assert common
    assert {key: made[key] for key in common} == {key: reference[key] for key in common}


@pytest.mark.parametrize("draft", ["eagle3", "mtp"])
def test_a_long_rest_is_interrupted_by_catching_up(draft: str, pairs: dict[str, Pair]) -> None:
    engine, _ = watched(pairs[draft], now_and_then(10_000, 1))
    plain = make_engine(pairs[draft].target)
    assert engine.generate(PROMPTS, max_tokens=300) == plain.generate(PROMPTS, max_tokens=300)
    assert engine.counts().drafted == [0, 0, 0]
    assert engine.counts().chosen[1:] == [0, 0, 0]
    assert engine.counts().chosen[0] >= 300


@pytest.mark.parametrize("draft", ["eagle3", "mtp", "self"])
def test_preempted_while_resting(draft: str, pairs: dict[str, Pair]) -> None:
    """Too few blocks for all: sequences begin anew, and what was kept for them is of no use."""
    engine, _ = watched(pairs[draft], now_and_then(6, 2), num_kv_blocks=9)
    assert engine.generate(PROMPTS, max_tokens=60) == make_engine(pairs[draft].target).generate(PROMPTS, max_tokens=60)
    assert engine.scheduler.preemptions
