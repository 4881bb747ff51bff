"""Speculation over HTTP: the plain engine's answers, and counters that agree with each other and with the clients.

Cases b4, b6, b7, d3, d4, d5. The oracle is the same target without a draft, in this process.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from agreement import agree
from live_server import LiveServer, samples, stream_events, streamed_text

from tests.spec.drafts import Pair, write_pairs
from tests.spec.engine_harness import make_engine

METHODS = ["self", "mtp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ngram", "noisy", "eagle3"))]
K = 4
SPEC = "outrider_spec_decode_"
TWINS = {
    f"{SPEC}drafts_total": "vllm:spec_decode_num_drafts_total",
    f"{SPEC}draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
    f"{SPEC}accepted_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
    f"{SPEC}draft_tokens_per_position_total": "vllm:spec_decode_num_draft_tokens_per_pos_total",
    f"{SPEC}accepted_tokens_per_position_total": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
}
PROMPTS = [[5, 9, 200, 31, 7, 7, 64, 5, 9], [17] * 30, list(range(60, 97)), [65, 66] * 20]


@dataclass(frozen=True)
class Served:
    """A server and what it serves."""

    method: str
    pair: Pair
    server: LiveServer


@pytest.fixture(scope="module", params=METHODS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pair = write_pairs(tmp_path_factory.mktemp("pairs"))[request.param]
    flags = ["--speculative-config.num_speculative_tokens", str(K)]
    for key, value in pair.speculative.items():
        flags += [f"--speculative-config.{key}", str(value)]
    shape = ("--dtype", "float32", "--num-kv-blocks", "200", "--max-num-batched-tokens", "64")
    server = LiveServer(tmp_path_factory.mktemp("served"), str(pair.target), *shape, *flags)
    yield Served(request.param, pair, server.ready())
    server.kill()


def read(server: LiveServer) -> dict[tuple[str, str], float]:
    """By name, and position or bucket where there is one."""
    found = {}
    for name, labels, value in samples(server.scrape()):
        if "spec_decode" in name:
            assert math.isfinite(value)
            found[name, labels.get("position", labels.get("le", ""))] = value
    return found


def assert_consistent(figures: dict[tuple[str, str], float]) -> None:
    def at(name: str, position: int) -> float:
        return figures[SPEC + name, str(position)]

    for ours, theirs in TWINS.items():
        mine = {place: value for (name, place), value in figures.items() if name == ours}
        assert mine
        assert mine == {place: value for (name, place), value in figures.items() if name == theirs}
    drafted = [at("draft_tokens_per_position_total", i) for i in range(K)]
    accepted = [at("accepted_tokens_per_position_total", i) for i in range(K)]
    assert sum(drafted) == figures[f"{SPEC}draft_tokens_total", ""]
    assert sum(accepted) == figures[f"{SPEC}accepted_tokens_total", ""] == figures[f"{SPEC}accepted_length_sum", ""]
    assert drafted[0] == figures[f"{SPEC}drafts_total", ""] == figures[f"{SPEC}accepted_length_count", ""]
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert drafted == sorted(drafted, reverse=True)
    assert accepted == sorted(accepted, reverse=True)
    # As many drafts were accepted to position i as have an accepted length above i.
    below = [figures[f"{SPEC}accepted_length_bucket", f"{i}.0"] for i in range(K)]
    assert [drafted[0] - count for count in below] == accepted


def test_all_series_are_zero_before_the_first_draft(served: Served) -> None:
    figures = read(served.server)
    constant = (f"{SPEC}info",)
    assert {value for (name, _), value in figures.items() if name not in constant} == {0}
    assert_consistent(figures)
    text = served.server.scrape()
    assert (
        f"# HELP {SPEC}accepted_tokens_total Drafted tokens that the target confirmed; the token that it adds" in text
    )


async def test_answers_are_those_of_the_plain_engine_and_every_counter_agrees(served: Served) -> None:
    server = served.server
    asked = [(prompt, count) for prompt in PROMPTS for count in (1, 2, 5, 23, 40)]
    oracle = make_engine(served.pair.target, num_kv_blocks=100)
    expected = dict(zip(map(tuple, PROMPTS), oracle.generate(PROMPTS, max_tokens=40), strict=True))
    before, generated = read(server), server.metric("outrider_generation_tokens_total")
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "metrics": True, "logprobs": 0}
    async with server.client() as client:

        async def ask(prompt: list[int], count: int) -> dict[str, Any]:
            response = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": count, **body})
            answer: dict[str, Any] = response.json()
            return answer

        answers = await asyncio.gather(*(ask(*one) for one in asked))
    server.wait_for(server.is_idle)
    told = []
    for (prompt, count), answer in zip(asked, answers, strict=True):
        choice = answer["choices"][0]
        assert choice["token_ids"] == expected[tuple(prompt)][:count]
        assert answer["usage"]["completion_tokens"] == count == len(choice["logprobs"]["tokens"])
        told.append(answer["metrics"]["speculative_decoding"])
        assert sum(told[-1]["acceptance_histogram"]) == told[-1]["num_spec_steps"]
        assert told[-1]["num_spec_tokens"] == K
        if told[-1]["num_spec_steps"]:
            length = 1 + told[-1]["num_accepted_draft_tokens"] / told[-1]["num_spec_steps"]
            assert told[-1]["mean_acceptance_length"] == pytest.approx(length)
    after = read(server)
    assert_consistent(after)
    delta = {key: value - before[key] for key, value in after.items()}
    assert server.metric("outrider_generation_tokens_total") - generated == sum(count for _, count in asked)
    assert delta[f"{SPEC}drafts_total", ""] == sum(one["num_spec_steps"] for one in told)
    assert delta[f"{SPEC}draft_tokens_total", ""] == sum(one["num_draft_tokens"] for one in told) > 0
    assert delta[f"{SPEC}accepted_tokens_total", ""] == sum(one["num_accepted_draft_tokens"] for one in told)
    if served.method == "self":
        assert delta[f"{SPEC}accepted_tokens_total", ""] == delta[f"{SPEC}draft_tokens_total", ""]


async def test_with_and_without_drafts_whole_choices_are_equal(served: Served) -> None:
    """Stop strings and scores among them, streamed or not."""
    server = served.server
    base = {"prompt": PROMPTS[2], "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    base["allowed_token_ids"] = list(range(94))  # printable ASCII, so that a token is a character
    text = server.complete(**base)["choices"][0]["text"]
    stop = next(text[i : i + 2] for i in range(5, len(text) - 2) if text.find(text[i : i + 2]) == i)
    bodies: list[dict[str, Any]] = [
        {"stop": stop, "logprobs": 2},
        {"stop": stop, "logprobs": 2, "include_stop_str_in_output": True},
        *({"stop": stop, "max_tokens": text.find(stop) + more} for more in (0, 1, 2, 3)),
        {"min_tokens": 25, "stop": stop},
        {"repetition_penalty": 1.3, "logprobs": 1},
        {"frequency_penalty": 0.5, "presence_penalty": -2, "n": 2},
        {"temperature": 0.9, "seed": 42, "n": 3, "logprobs": 1},
        {"temperature": 1.3, "seed": 7, "min_p": 0.05, "top_k": 40, "bad_words": ["a", "b"]},
        {"echo": True, "logprobs": 1, "max_tokens": 9},
    ]
    async with server.client() as client:

        async def ask(body: dict[str, Any], drafts: bool) -> Any:
            whole = {**base, **body, "speculative_decoding": drafts}
            return (await client.post("/v1/completions", json=whole)).json()

        with_drafts = await asyncio.gather(*(ask(body, True) for body in bodies))
        without = await asyncio.gather(*(ask(body, False) for body in bodies))
        for body, one, other in zip(bodies, with_drafts, without, strict=True):
            assert agree(one["choices"], other["choices"]), (body, one["choices"], other["choices"])
            assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]
            streamed = await stream_events(client, "/v1/completions", {**base, **body, "speculative_decoding": True})
            assert streamed_text(streamed) == one["choices"][0]["text"]
    assert with_drafts[0]["choices"][0]["finish_reason"] == "stop"
    assert with_drafts[0]["choices"][0]["text"] == text[: text.find(stop)]


def test_one_sample_of_inter_token_time_per_token(served: Served) -> None:
    """Case d3, with steps that make five tokens each."""
    server = served.server
    names = ("inter_token_seconds", "request_decode_seconds")
    before = {name: (server.metric(f"outrider_{name}_count"), server.metric(f"outrider_{name}_sum")) for name in names}
    answer = server.complete(PROMPTS[0], max_tokens=101, temperature=0, ignore_eos=True, metrics=True)
    assert answer["usage"]["completion_tokens"] == 101
    delta = {
        name: (server.metric(f"outrider_{name}_count") - count, server.metric(f"outrider_{name}_sum") - total)
        for name, (count, total) in before.items()
    }
    assert delta["inter_token_seconds"][0] == 100
    assert delta["request_decode_seconds"][0] == 1
    assert delta["inter_token_seconds"][1] == pytest.approx(delta["request_decode_seconds"][1], abs=1e-6)
    if served.method == "self":
        assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] == 20
        assert answer["metrics"]["speculative_decoding"]["acceptance_histogram"] == [0, 0, 0, 0, 20]


def test_metrics_say_how_it_drafts(served: Served) -> None:
    method = served.pair.speculative["method"]
    labels = {"method": method, "num_speculative_tokens": str(K), "adaptive": "false"}
    assert served.server.metric(f"{SPEC}info", **labels) == 1
    if method != "ngram":
        assert served.server.metric("outrider_model_info", role="draft", method=method) == 1
