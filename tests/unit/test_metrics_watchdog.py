"""The watchdogs bark at what they are for, once an episode, and at nothing else."""

from __future__ import annotations

import logging
import random

import pytest

from server.activity import ActivityLog
from server.messages import DraftCounts, EngineStats, RequestOutput, SpeculativeInfo
from server.metrics.recorder import Metrics
from server.spec.acceptance import acceptance_length, rates, since
from server.spec.counts import AcceptanceCounter
from server.spec.watchdog import WINDOW_DRAFTS, AcceptanceWatchdog


class Drafts:
    """Drafts accepted by lot, position by position, with a seed."""

    def __init__(self, k: int) -> None:
        self.counter = AcceptanceCounter(k)
        self.k = k
        self.random = random.Random(1)

    def make(self, count: int, *chances: float, k: int | None = None) -> DraftCounts:
        drafted = k or self.k
        for _ in range(count):
            accepted = 0
            while accepted < drafted and self.random.random() < chances[min(accepted, len(chances) - 1)]:
                accepted += 1
            self.counter.add([RequestOutput(1, [0] * (accepted + 1), drafted=drafted, accepted=accepted)])
        return self.counter.snapshot()


def barks(k: int, *chances: float, drafts: int = 5 * WINDOW_DRAFTS) -> set[str]:
    """Kinds that barked while so many drafts came, 7 a step."""
    made, dog, heard = Drafts(k), AcceptanceWatchdog(), set()
    for _ in range(drafts // 7):
        heard |= {change.kind for change in dog.observe(made.make(7, *chances)) if change.barks}
    return heard


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_draft_that_knows_nothing_is_noticed(k: int) -> None:
    assert barks(k, 0.0) == {"near_zero"}
    assert barks(k, 0.005) == {"near_zero"}


@pytest.mark.parametrize("k", [2, 3, 8])
def test_a_draft_that_collapses_after_its_first_token_is_noticed(k: int) -> None:
    assert barks(k, 0.8, 0.0) == {"collapsed"}
    assert barks(k, 0.95, 0.02) == {"collapsed"}
    assert barks(k, 0.6, 0.01) == {"collapsed"}


@pytest.mark.parametrize("k", [1, 2, 5, 16])
@pytest.mark.parametrize("chances", [(0.9,), (0.7, 0.6, 0.5), (0.5, 0.25), (0.45, 0.05), (0.3,), (1.0,)])
def test_other_drafts_are_left_in_peace(k: int, chances: tuple[float, ...]) -> None:
    assert barks(k, *chances) == set()


def test_too_few_drafts_are_not_judged() -> None:
    assert AcceptanceWatchdog().observe(Drafts(3).make(WINDOW_DRAFTS - 1, 0.0)) == []
    assert AcceptanceWatchdog().observe(DraftCounts()) == []
    made, dog = Drafts(3), AcceptanceWatchdog()
    made.make(20, 0.9, 0.0)  # the only ones with a position 1
    assert dog.observe(made.make(WINDOW_DRAFTS, 0.9, k=1)) == []


def test_an_episode_is_told_once_at_its_begin_and_once_at_its_end() -> None:
    made, dog = Drafts(3), AcceptanceWatchdog()
    windows = [(0.9, 0.0)] * 4 + [(0.9,)] * 3 + [(0.0,)] * 3 + [(0.9, 0.0)] * 2
    told = [
        [(change.kind, change.barks) for change in dog.observe(made.make(WINDOW_DRAFTS, *chances))]
        for chances in windows
    ]
    assert told == [
        [("collapsed", True)],
        [],
        [],
        [],
        [("collapsed", False)],
        [],
        [],
        [("near_zero", True)],
        [],
        [],
        [("near_zero", False), ("collapsed", True)],
        [],
    ]


def test_a_bark_is_a_warning_and_a_gauge(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metrics = Metrics("m", "outrider")
    log = ActivityLog(metrics.speculation.watchdog)
    log.ready(SpeculativeInfo("mtp", 3, adaptive=False, synthetic=False))
    made = Drafts(3)

    def observe(*chances: float) -> str:
        drafts = made.make(WINDOW_DRAFTS, *chances)
        log.observe(EngineStats(0, 0, 0.0, 0, 0, 0, 1, {}, drafts), 0, 0.0)
        return metrics.render("")[0].decode()

    gauge = 'outrider_spec_decode_watchdog{model_name="m",kind="near_zero"} '
    assert gauge + "0.0" in observe(0.9)
    assert gauge + "1.0" in observe(0.0) and gauge + "1.0" in observe(0.0)
    assert gauge + "0.0" in observe(0.9)
    assert [(record.levelname, record.message.split(":")[0]) for record in caplog.records] == [
        ("WARNING", "drafts are worth nothing"),
        ("INFO", "drafts are worth something again"),
    ]
    assert "0 of 600 drafted tokens (0.0%)" in caplog.messages[0]


def test_synthetic_acceptance_is_told_and_not_watched(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    log = ActivityLog(lambda kind, _: heard.append(kind))
    log.ready(SpeculativeInfo("mtp", 3, adaptive=False, synthetic=True))
    assert "SYNTHETIC" in caplog.messages[0] and caplog.records[0].levelname == "WARNING"
    log.observe(EngineStats(0, 0, 0.0, 0, 0, 0, 1, {}, Drafts(3).make(WINDOW_DRAFTS, 0.0)), 0, 0.0)
    assert heard == []


def test_figures_of_nothing_are_nothing() -> None:
    assert (rates(DraftCounts()), acceptance_length(DraftCounts())) == ([], None)
    counts = DraftCounts([4, 2, 0], [2, 2, 0], [2, 0, 2, 0])
    assert (rates(counts), acceptance_length(counts)) == ([0.5, 1.0, None], 2.0)
    assert since(DraftCounts(), counts) == counts
    assert since(counts, counts) == DraftCounts([0, 0, 0], [0, 0, 0], [0, 0, 0, 0])
