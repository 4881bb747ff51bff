"""/metrics parses, begins at 0, says the same under both families of names, and keeps its labels bounded."""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from server.messages import EngineReady, EngineStats, FinishReason, KVGroup, LoadedModel, ResolvedRow
from server.metrics import names
from server.metrics.recorder import Metrics
from tests.ops.real_prometheus import binary

ALL = [value for value in vars(names).values() if isinstance(value, names.Metric)]
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True)
class Finished:
    finish_reason: FinishReason = "stop"
    prompt_tokens: int = 5
    generation_tokens: int = 101
    total_seconds: float = 3.5
    queue_seconds: float | None = 0.5
    prefill_seconds: float | None = 1.0
    decode_seconds: float | None = 2.0


READY = EngineReady(
    rows=[
        ResolvedRow("target", "attention", "unset", "torch", "auto", "why"),
        ResolvedRow("target", "moe", "auto", "none", "auto"),
    ],
    kv_groups=[KVGroup(0, 16, 32, 1000, 30)],
    models=[LoadedModel("target", "LlamaForCausalLM", 135_000_000, "ab12")],
    max_model_len=8192,
    kv_bytes=2**30,
    device="cpu",
    load_seconds=1.5,
    vocab_size=49_152,
)


def families(metrics: Metrics) -> dict[str, Metric]:
    return {family.name: family for family in parse_text(metrics.render("")[0].decode())}


def series(metrics: Metrics, accept: str = "") -> Series:
    parse = parse_openmetrics if accept else parse_text
    samples = [sample for family in parse(metrics.render(accept)[0].decode()) for sample in family.samples]
    result = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(result) == len(samples), "a series is shown twice"
    return result


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return series(metrics)[name, frozenset({"model_name": "m", **labels}.items())]


def busy() -> Metrics:
    metrics = Metrics("m", "both")
    metrics.engine_ready(READY)
    metrics.engine_up(True)
    metrics.prompt_tokens(5)
    metrics.generation_tokens(101)
    metrics.time_to_first_token(1.5)
    metrics.token_intervals(0.02, 100)
    metrics.sequence_finished(Finished())
    metrics.rejected("queue_full")
    metrics.http_request("/v1/completions", "POST", 200)
    metrics.engine_stats(EngineStats(2, 1, 0.25, 3, 500, 200, 7, {"target": [0.01, 0.02], "schedule": [0.0001]}))
    return metrics


def test_all_series_exist_at_zero_from_the_start() -> None:
    metrics = Metrics("m", "both")
    shown = series(metrics)
    assert set(shown.values()) == {0.0}
    for metric in ALL:
        suffix = "_count" if metric.kind == "histogram" else ""
        for values in metric.values:
            labels = {"model_name": "m", **dict(zip(metric.labels, values, strict=True))}
            assert (metric.name + suffix, frozenset(labels.items())) in shown


def test_what_happens_is_counted() -> None:
    metrics = busy()
    assert value(metrics, "outrider_requests_total", finish_reason="stop") == 1
    assert value(metrics, "outrider_generation_tokens_total") == 101
    assert value(metrics, "outrider_inter_token_seconds_count") == 100
    assert value(metrics, "outrider_inter_token_seconds_sum") == pytest.approx(2.0)
    assert value(metrics, "outrider_request_time_per_output_token_seconds_sum") == pytest.approx(0.02)
    assert value(metrics, "outrider_request_seconds_bucket", le="2.5") == 0
    assert value(metrics, "outrider_request_seconds_bucket", le="5.0") == 1
    assert value(metrics, "outrider_rejected_requests_total", reason="queue_full") == 1
    assert value(metrics, "outrider_step_seconds_count", phase="target") == 2
    assert value(metrics, "outrider_prefix_cache_hits_total") == 200
    assert value(metrics, "outrider_kv_cache_usage_ratio") == 0.25
    assert value(
        metrics,
        "outrider_backend_info",
        role="target",
        component="attention",
        requested="unset",
        resolved="torch",
        source="auto",
    )
    assert value(metrics, "vllm:cache_config_info", engine="0", block_size="16", num_gpu_blocks="1000") == 1


def test_engine_counters_are_totals() -> None:
    metrics = busy()
    metrics.engine_stats(EngineStats(0, 0, 0.0, 4, 600, 250, 9, {}))
    assert value(metrics, "outrider_preemptions_total") == 4
    assert value(metrics, "outrider_prefix_cache_queries_total") == 600
    assert value(metrics, "outrider_step_seconds_count", phase="target") == 2


def test_a_lost_engine_runs_nothing() -> None:
    metrics = busy()
    metrics.engine_lost()
    for name in ("outrider_requests_running", "outrider_requests_waiting", "outrider_kv_cache_usage_ratio"):
        assert value(metrics, name) == 0
    assert value(metrics, "outrider_preemptions_total") == 3


def test_twins_repeat_the_numbers() -> None:
    shown = series(busy())
    compared = 0
    for metric in ALL:
        if metric.twin is None:
            continue
        for (name, labels), number in shown.items():
            base = metric.name
            if name in (base, base + "_bucket", base + "_count", base + "_sum"):
                renamed = {metric.twin_labels.get(label, label): text for label, text in labels} | {"engine": "0"}
                assert shown[metric.twin + name[len(base) :], frozenset(renamed.items())] == number
                compared += number > 0
    assert compared > 30


def test_names_are_shown_as_asked() -> None:
    def shown(which: str) -> set[str]:
        metrics = Metrics("m", which)  # type: ignore[arg-type]
        metrics.engine_ready(READY)
        return {name for name, _ in series(metrics)}

    ours, theirs = shown("outrider"), shown("vllm")
    assert all(name.startswith("outrider_") for name in ours)
    assert all(name.startswith("vllm:") for name in theirs)
    assert shown("both") == ours | theirs
    assert {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= theirs


def test_names_that_vllm_has_left_behind_tell_the_same() -> None:
    shown = series(busy())
    for now, before in (
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ("vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count"),
        ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    ):
        found = [value for (name, _), value in shown.items() if name == before]
        assert found == [value for (name, _), value in shown.items() if name == now] != [0]


def test_which_server_it_is_and_since_when() -> None:
    metrics = busy()
    metrics.started("1.2.3", 1.7e9)
    metrics.request_finished(40)
    assert value(metrics, "outrider_build_info", version="1.2.3") == 1
    assert value(metrics, "outrider_start_time_seconds") == 1.7e9
    assert value(metrics, "outrider_request_longest_choice_tokens_sum") == 40


def test_openmetrics_when_asked_for() -> None:
    metrics = busy()
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    assert metrics.render(accept)[1].startswith("application/openmetrics-text")
    assert metrics.render("text/plain")[1] == "text/plain; version=0.0.4; charset=utf-8"
    assert series(metrics, accept) == series(metrics)


def test_kinds_and_help_are_told() -> None:
    shown = families(busy())
    for metric in ALL:
        family = shown[metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
    assert not any(sample.name.endswith("_created") for family in shown.values() for sample in family.samples)


@settings(deadline=None)
@given(st.text())
def test_any_model_name_is_read_back(name: str) -> None:
    shown = {sample.labels["model_name"] for f in families(Metrics(name, "both")).values() for sample in f.samples}
    assert shown == {name}


@settings(deadline=None)
@given(st.lists(st.floats(min_value=0, max_value=1e4), max_size=30))
def test_buckets_hold_what_is_at_most_their_bound(samples: list[float]) -> None:
    metrics = Metrics("m", "outrider")
    for sample in samples:
        metrics.time_to_first_token(sample)
    for (name, labels), number in series(metrics).items():
        if name == "outrider_time_to_first_token_seconds_bucket":
            bound = float(dict(labels)["le"])
            assert number == sum(sample <= bound for sample in samples)
    total = value(metrics, "outrider_time_to_first_token_seconds_sum")
    assert math.isclose(total, sum(samples), rel_tol=1e-9, abs_tol=1e-9)


def test_a_label_too_few_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="finish_reason"):
        Metrics("m", "both")._requests.of()


def test_promtool_finds_nothing_to_say() -> None:
    promtool = binary("promtool")
    metrics = Metrics("m", "outrider")
    metrics.engine_ready(READY)
    metrics.http_request("/v1/completions", "POST", 200)
    done = subprocess.run([promtool, "check", "metrics"], input=metrics.render("")[0], capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
