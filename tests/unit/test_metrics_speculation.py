"""The spec part of /metrics: there from the start, in agreement with itself, and never NaN."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from server.activity import ActivityLog
from server.messages import DraftCounts, EngineReady, EngineStats, RequestOutput, SpeculativeInfo
from server.metrics import names
from server.metrics.recorder import Metrics
from server.spec.counts import AcceptanceCounter

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
SPEC = "outrider_spec_decode_"
TWIN = "vllm:spec_decode_num_"


def stats(drafts: DraftCounts, steps: int = 1) -> EngineStats:
    return EngineStats(3, 1, 0.125, 0, 0, 0, steps, {"draft": [0.01]}, drafts)


def info(k: int, *, synthetic: bool = False) -> SpeculativeInfo:
    return SpeculativeInfo("mtp", k, adaptive=True, synthetic=synthetic, draft_sample_method="greedy")


def ready(speculative: SpeculativeInfo | None) -> EngineReady:
    return EngineReady([], [], [], 100, 1, "cpu", 0.1, 400, speculative)


def series(metrics: Metrics) -> Series:
    families = text_string_to_metric_families(metrics.render("")[0].decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def one(shown: Series, name: str, **labels: str) -> float:
    return shown[name, frozenset({"model_name": "m", **labels}.items())]


def by_position(shown: Series, name: str) -> list[float]:
    found = {int(dict(labels)["position"]): value for (n, labels), value in shown.items() if n == name}
    assert sorted(found) == list(range(len(found)))
    return [found[position] for position in sorted(found)]


def buckets(shown: Series) -> dict[str, float]:
    return {dict(labels)["le"]: value for (n, labels), value in shown.items() if n == SPEC + "accepted_length_bucket"}


COUNTERS = {
    "drafts_total": "drafts_total",
    "draft_tokens_total": "draft_tokens_total",
    "accepted_tokens_total": "accepted_tokens_total",
    "draft_tokens_per_position_total": "draft_tokens_per_pos_total",
    "accepted_tokens_per_position_total": "accepted_tokens_per_pos_total",
}


def test_the_documentation_has_a_row_for_each_metric() -> None:
    text = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text(encoding="utf-8")
    for metric in vars(names).values():
        if isinstance(metric, names.Metric) and metric.name.startswith(SPEC):
            row = next(line for line in text.splitlines() if line.startswith(f"| `{metric.name}"))
            assert metric.twin is None or f"`{metric.twin.removeprefix('vllm:')}`" in row


def test_position_0_is_there_at_0_when_the_server_does_not_speculate() -> None:
    metrics = Metrics("m", "both")
    metrics.engine_ready(ready(None))
    metrics.engine_stats(stats(DraftCounts()))
    shown = series(metrics)
    for ours, theirs in COUNTERS.items():
        labels = {"position": "0"} if "position" in ours else {}
        assert one(shown, SPEC + ours, **labels) == 0
        assert one(shown, TWIN + theirs, engine="0", **labels) == 0
    assert buckets(shown) == {"0.0": 0, "+Inf": 0}
    assert one(shown, SPEC + "accepted_length_count") == one(shown, SPEC + "accepted_length_sum") == 0
    assert one(shown, SPEC + "synthetic") == 0
    for kind in ("near_zero", "collapsed"):
        assert one(shown, SPEC + "watchdog", kind=kind) == 0
    for phase in ("schedule", "target", "draft", "verify"):
        assert ("outrider_step_seconds_count", frozenset({("model_name", "m"), ("phase", phase)})) in shown
    assert SPEC + "info" not in {name for name, _ in shown}


@pytest.mark.parametrize("k", [1, 3, 16])
def test_all_positions_are_there_at_0_before_the_first_draft(k: int) -> None:
    metrics = Metrics("m", "both")
    series(metrics)  # rendered before, as a scraper does
    metrics.engine_ready(ready(info(k)))
    metrics.engine_stats(stats(AcceptanceCounter(k).snapshot()))
    shown = series(metrics)
    assert by_position(shown, SPEC + "draft_tokens_per_position_total") == [0] * k
    assert by_position(shown, SPEC + "accepted_tokens_per_position_total") == [0] * k
    assert by_position(shown, TWIN + "accepted_tokens_per_pos_total") == [0] * k
    assert list(buckets(shown)) == [*(str(float(n)) for n in range(k + 1)), "+Inf"]
    assert not any(math.isnan(value) for value in shown.values())
    labels = {"method": "mtp", "num_speculative_tokens": str(k), "adaptive": "true", "draft_sample_method": "greedy"}
    assert one(shown, SPEC + "info", rejection_sample_method="standard", **labels) == 1


def test_nobody_mistakes_synthetic_acceptance() -> None:
    metrics = Metrics("m", "both")
    metrics.engine_ready(ready(info(3, synthetic=True)))
    shown = series(metrics)
    assert one(shown, SPEC + "synthetic") == 1
    methods = {dict(labels).get("rejection_sample_method") for name, labels in shown if name == SPEC + "info"}
    assert methods == {"synthetic"}


drafts = st.integers(1, 6).flatmap(
    lambda k: st.tuples(
        st.just(k),
        st.lists(st.integers(0, k).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=40),
    )
)


@given(drafts)
def test_the_numbers_agree_whatever_the_drafts(case: tuple[int, list[tuple[int, int]]]) -> None:
    k, steps = case
    counter, metrics = AcceptanceCounter(k), Metrics("m", "both")
    metrics.engine_ready(ready(info(k)))
    for drafted, accepted in steps:
        counter.add([RequestOutput(1, [0] * (accepted + 1), drafted=drafted, accepted=accepted)])
        metrics.engine_stats(stats(counter.snapshot()))
    shown = series(metrics)
    drafted_at = by_position(shown, SPEC + "draft_tokens_per_position_total")
    accepted_at = by_position(shown, SPEC + "accepted_tokens_per_position_total")
    assert sum(drafted_at) == one(shown, SPEC + "draft_tokens_total") == sum(d for d, _ in steps)
    assert sum(accepted_at) == one(shown, SPEC + "accepted_tokens_total") == sum(a for _, a in steps)
    assert all(a <= d for a, d in zip(accepted_at, drafted_at, strict=True))
    assert drafted_at == sorted(drafted_at, reverse=True) and accepted_at == sorted(accepted_at, reverse=True)
    made = [accepted for drafted, accepted in steps if drafted]
    assert one(shown, SPEC + "drafts_total") == one(shown, SPEC + "accepted_length_count") == len(made)
    assert drafted_at[0] == len(made)
    assert one(shown, SPEC + "accepted_length_sum") == sum(made)
    assert buckets(shown) == {
        **{str(float(n)): sum(length <= n for length in made) for n in range(k + 1)},
        "+Inf": len(made),
    }
    for ours, theirs in COUNTERS.items():
        for (name, labels), value in shown.items():
            if name == SPEC + ours:
                assert shown[TWIN + theirs, labels | {("engine", "0")}] == value


def test_a_line_every_ten_seconds_of_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = ActivityLog(lambda *_: None)
    log.ready(info(2))
    log.observe(stats(DraftCounts([0, 0], [0, 0], [0, 0, 0]), steps=0), 0, 100.0)
    for second in range(1, 10):
        log.observe(stats(DraftCounts([9, 9], [9, 9], [0, 0, 9]), steps=second), 10 * second, 100.0 + second)
    assert caplog.messages == []
    log.observe(stats(DraftCounts([40, 20], [30, 5], [10, 25, 5]), steps=10), 500, 110.0)
    assert caplog.messages == [
        "50.0 tokens/s, 3 running, 1 waiting, KV cache 12% used; "
        "40 drafts, acceptance length 1.88, by position 0.75 0.25"
    ]
    log.observe(stats(DraftCounts([40, 20], [30, 5], [10, 25, 5]), steps=10), 500, 120.0)  # idle
    assert len(caplog.messages) == 1
    log.observe(stats(DraftCounts([44, 20], [30, 5], [14, 25, 5]), steps=11), 502, 130.0)
    assert caplog.messages[1].startswith("0.2 tokens/s") and caplog.messages[1].endswith(
        "; 4 drafts, acceptance length 1.00, by position 0.00 -"
    )
    log.observe(stats(DraftCounts([44, 20], [30, 5], [14, 25, 5]), steps=12), 600, 140.0)
    assert "drafts" not in caplog.messages[2]
