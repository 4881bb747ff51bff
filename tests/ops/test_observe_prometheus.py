"""A real Prometheus scrapes busy servers: rules and panels have data, and only a broken draft alerts.

The rules are those of deploy/, except that a minute of their windows and delays lasts a second (`hurried`).
"""

from __future__ import annotations

import math
import random
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.live_server import LiveServer
from tests.e2e.tiny_checkpoint import tiny_tokenizer
from tests.observe_files import RULE_TESTS, panel_expressions, rules
from tests.ops.real_prometheus import RealPrometheus, binary
from tests.ops.steady_load import SteadyLoad
from tests.spec.table_models import VOCAB, table, write_table_eagle3, write_table_target

K = 3
LAYERS = 10
"""Of the target, so that its one-layer head costs little beside it."""
FAIR = ((3, 9), tuple(range(8, 24)), tuple(range(0, 64, 2)))
"""By position: the tokens that the healthy head drafts wrongly."""
SABOTAGED = ((), *(tuple(range(1, VOCAB)) for _ in range(K)))
"""From position 1 on, the head knows but one token."""


@dataclass(frozen=True)
class Watched:
    """Two servers under load, and what watches them."""

    prometheus: RealPrometheus
    healthy: LiveServer
    sabotaged: LiveServer


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    binary("prometheus")
    folder, rule = tmp_path_factory.mktemp("watched"), table(2)
    target = write_table_target(folder / "target", rule, layers=LAYERS)
    (folder / "tokenizer").mkdir()
    tiny_tokenizer().save(str(folder / "tokenizer" / "tokenizer.json"))
    with ExitStack() as stack:
        servers = {}
        for name, wrong in (("healthy", FAIR), ("sabotaged", SABOTAGED)):
            head = write_table_eagle3(folder / name, rule, wrong)
            flags = ("--speculative-config.method", "eagle3", "--speculative-config.model", str(head))
            flags += ("--speculative-config.num_speculative_tokens", str(K), "--served-model-name", name)
            flags += ("--tokenizer", str(folder / "tokenizer"), "--dtype", "float32", "--num-kv-blocks", "400")
            servers[name] = LiveServer(tmp_path_factory.mktemp(name), str(target), *flags)
            stack.callback(servers[name].kill)
        urls = {name: server.ready().url for name, server in servers.items()}
        prometheus = RealPrometheus(tmp_path_factory.mktemp("prometheus"), urls)
        stack.callback(prometheus.kill)
        load = [SteadyLoad(url, request, clients=2) for url in urls.values()]
        yield Watched(prometheus, **servers)
        outcomes = [set(one.stop()) for one in load]
    assert outcomes == [{"200"}, {"200"}]


def request(draw: random.Random) -> dict[str, Any]:
    return {
        "prompt": [draw.randrange(VOCAB) for _ in range(draw.randint(8, 100))],
        "max_tokens": draw.randint(10, 120),
        "temperature": 0,
        "ignore_eos": True,
    }


def test_the_rules_do_as_they_say() -> None:
    done = subprocess.run(
        [binary("promtool"), "test", "rules", RULE_TESTS.name], cwd=RULE_TESTS.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([binary("promtool"), "check", "config", RULE_TESTS.parent / "prometheus.yml"], check=False)
    assert done.returncode == 0


def test_promtool_finds_nothing_to_say_of_a_busy_server(watched: Watched) -> None:
    text = watched.healthy.scrape()
    ours = "\n".join(line for line in text.splitlines() if "vllm:" not in line) + "\n"
    done = subprocess.run([binary("promtool"), "check", "metrics"], input=ours, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_only_the_broken_draft_alerts(watched: Watched) -> None:
    collapsed = ("OutriderAcceptanceCollapsed", "sabotaged")
    watched.prometheus.wait_for(lambda: collapsed in watched.prometheus.alerts(), seconds=90)
    assert {(name, instance) for name, instance in watched.prometheus.alerts() if instance != "sabotaged"} == set()
    rates = dict_by_position(watched.prometheus, "sabotaged")
    assert rates["0"] > 0.9 and rates["1"] < 0.1
    rates = dict_by_position(watched.prometheus, "healthy")
    assert rates["0"] > rates["1"] > rates["2"] > 0.1
    assert watched.sabotaged.metric("outrider_spec_decode_watchdog", kind="collapsed") == 1
    assert watched.healthy.metric("outrider_spec_decode_watchdog") == 0


def dict_by_position(prometheus: RealPrometheus, instance: str) -> dict[str, float]:
    found = prometheus.query(f'outrider:spec_decode_acceptance_by_position:ratio_rate5m{{instance="{instance}"}}')
    return {labels["position"]: value for labels, value in found}


def test_every_record_and_every_panel_has_data(watched: Watched) -> None:
    """Of the healthy server alone."""
    for record in (rule["record"] for rule in rules() if "record" in rule):
        watched.prometheus.wait_for(lambda name=record: watched.prometheus.query(name))
    empty = []
    for expression in panel_expressions("5s", "healthy"):
        found = watched.prometheus.query(expression.text)
        if not found or any(math.isnan(value) for _, value in found):
            empty.append(f"{expression}: {expression.text} {found}")
    assert empty == []


PUBLIC = [
    *(
        f"histogram_quantile({quantile}, sum by(le) (rate(vllm:{name}_bucket{{SELECTED}}[5s])))"
        for name in (
            "e2e_request_latency_seconds",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "time_per_output_token_seconds",
            "request_time_per_output_token_seconds",
        )
        for quantile in (0.5, 0.99)
    ),
    *(
        f"rate(vllm:{name}_sum{{SELECTED}}[5s]) / rate(vllm:{name}_count{{SELECTED}}[5s])"
        for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
    ),
    *(f"rate(vllm:{name}{{SELECTED}}[5s])" for name in ("prompt_tokens_total", "generation_tokens_total")),
    *(
        f"rate(vllm:{name}_sum{{SELECTED}}[5s])"
        for name in (
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_max_num_generation_tokens",
        )
    ),
    *(
        f"sum by(le) (increase(vllm:{name}_bucket{{SELECTED}}[5s]))"
        for name in ("request_prompt_tokens", "request_generation_tokens")
    ),
    "sum by(finished_reason) (increase(vllm:request_success_total{SELECTED}[5s]))",
    *(
        f"vllm:{name}{{SELECTED}}"
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc")
    ),
    "increase(vllm:num_preemptions_total{SELECTED}[5s])",
    "rate(vllm:prefix_cache_hits_total{SELECTED}[5s]) / rate(vllm:prefix_cache_queries_total{SELECTED}[5s])",
    "rate(vllm:spec_decode_num_accepted_tokens_total{SELECTED}[5s]) / "
    "rate(vllm:spec_decode_num_draft_tokens_total{SELECTED}[5s])",
    "1 + rate(vllm:spec_decode_num_accepted_tokens_total{SELECTED}[5s]) / "
    "rate(vllm:spec_decode_num_drafts_total{SELECTED}[5s])",
    "sum by(position) (rate(vllm:spec_decode_num_accepted_tokens_per_pos_total{SELECTED}[5s])) / "
    "ignoring(position) group_left sum(rate(vllm:spec_decode_num_drafts_total{SELECTED}[5s]))",
    'vllm:cache_config_info{block_size=~"[0-9]+",num_gpu_blocks=~"[0-9]+",instance="healthy"}',
]
"""The forms in which public dashboards and autoscalers for vLLM ask for its series."""


@pytest.mark.parametrize("expression", PUBLIC)
def test_what_public_dashboards_ask_for_has_data(expression: str, watched: Watched) -> None:
    text = expression.replace("{SELECTED}", '{model_name="healthy"}')
    found = watched.prometheus.wait_for(lambda: watched.prometheus.query(text))
    assert all(math.isfinite(value) for _, value in found), found


def test_an_endpoint_picker_finds_its_three_gauges_once_each(watched: Watched) -> None:
    text = httpx.get(watched.healthy.url + "/metrics", headers={"Accept": "text/plain"}, trust_env=False).text
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        assert len(lines) == 1
    assert 0 <= watched.healthy.metric("vllm:kv_cache_usage_perc") <= 1
