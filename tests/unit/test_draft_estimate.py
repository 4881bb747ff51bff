"""What a draft is expected to bring, against the series of its acceptance."""

from __future__ import annotations

import random

from server.messages import RequestOutput
from server.spec.estimate import AcceptanceEstimate
from server.spec.length import DraftLength


def feed(estimate: AcceptanceEstimate, rates: tuple[float, ...], drafts: int, seed: int = 0) -> None:
    draw = random.Random(seed)
    for _ in range(drafts):
        accepted = next((i for i, rate in enumerate(rates) if draw.random() >= rate), len(rates))
        estimate.add(len(rates), accepted)


def test_it_comes_to_the_acceptance_by_position_and_follows_it() -> None:
    estimate = AcceptanceEstimate(3)
    assert estimate.tokens(0) == 1.0
    for rates in ((0.8, 0.5, 0.9), (0.2, 0.5, 0.5)):
        feed(estimate, rates, 3000)
        expected = 1 + rates[0] + rates[0] * rates[1] + rates[0] * rates[1] * rates[2]
        assert abs(estimate.tokens(3) - expected) < 0.2
        assert abs(estimate.tokens(1) - 1 - rates[0]) < 0.1


def test_positions_that_no_draft_reached_are_not_judged() -> None:
    estimate = AcceptanceEstimate(2)
    before = estimate.tokens(2) - estimate.tokens(1)
    for _ in range(100):
        estimate.add(2, 0)
    assert estimate.tokens(1) < 1.02
    estimate.add(2, 1)
    assert 0 < estimate.tokens(2) - estimate.tokens(1) < before


def test_an_output_without_tokens_is_worth_none() -> None:
    length = DraftLength(3, adaptive=True)
    assert length.expected(RequestOutput(1, [])) == 0.0
    assert length.expected(RequestOutput(1, [5])) == 1.0
    assert length.expected(RequestOutput(1, [5, 6], drafted=2, accepted=1)) > 1.5
