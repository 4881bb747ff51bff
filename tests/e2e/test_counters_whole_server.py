"""Counters against what clients got (cases d3, d7, d9)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
from live_server import LiveServer, finish_reasons, samples, stream_events
from tiny_checkpoint import VOCAB_SIZE


def test_one_sample_of_inter_token_time_per_token_after_the_first(tiny: LiveServer) -> None:
    names = ("inter_token_seconds", "request_decode_seconds", "time_to_first_token_seconds", "request_seconds")
    before = {name: (tiny.metric(f"outrider_{name}_count"), tiny.metric(f"outrider_{name}_sum")) for name in names}
    assert tiny.complete("a", max_tokens=101, ignore_eos=True)["usage"]["completion_tokens"] == 101
    count, total = {}, {}
    for name in names:
        count[name] = tiny.metric(f"outrider_{name}_count") - before[name][0]
        total[name] = tiny.metric(f"outrider_{name}_sum") - before[name][1]
    assert count == dict.fromkeys(names, 1) | {"inter_token_seconds": 100}
    assert abs(total["inter_token_seconds"] - total["request_decode_seconds"]) < 1e-6
    whole = total["time_to_first_token_seconds"] + total["inter_token_seconds"]
    assert abs(total["request_seconds"] - whole) < 0.05 * whole


async def test_token_counters_are_the_sum_of_usage_whatever_is_preempted(tiny_crowded: LiveServer) -> None:
    server = tiny_crowded
    draw = random.Random(5)
    greedy = server.complete([9, 9], max_tokens=30, temperature=0, ignore_eos=True)["choices"][0]["text"]
    before = {
        name: server.metric(name) for name in ("outrider_generation_tokens_total", "outrider_prompt_tokens_total")
    }
    preempted = server.metric("outrider_preemptions_total")
    ended = {
        reason: server.metric("outrider_requests_total", finish_reason=reason) for reason in ("stop", "length", "error")
    }
    lengths = server.metric("outrider_request_generation_tokens_sum")

    async def ask(client: httpx.AsyncClient, number: int) -> tuple[dict[str, int], list[str]]:
        body: dict[str, object] = {
            "prompt": [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 150))],
            "max_tokens": draw.randint(1, 60),
            "n": draw.choice((1, 1, 2)),
            "ignore_eos": draw.random() < 0.5,
        }
        if number % 5 == 0:
            body |= {"prompt": [9, 9], "max_tokens": 30, "temperature": 0, "stop": greedy[10:13]}
        if number % 2:
            options = {"stream_options": {"include_usage": True}}
            events = await stream_events(client, "/v1/completions", body | options)
            return events[-2]["usage"], finish_reasons(events)
        answer = (await client.post("/v1/completions", json=body)).json()
        return answer["usage"], [choice["finish_reason"] for choice in answer["choices"]]

    async with server.client() as client:
        answers = await asyncio.gather(*(ask(client, number) for number in range(100)))
    server.wait_for(server.is_idle)
    generated = sum(usage["completion_tokens"] for usage, _ in answers)
    assert server.metric("outrider_preemptions_total") > preempted
    assert server.metric("outrider_generation_tokens_total") - before["outrider_generation_tokens_total"] == generated
    assert server.metric("outrider_request_generation_tokens_sum") - lengths == generated
    read = sum(usage["prompt_tokens"] for usage, _ in answers)
    assert server.metric("outrider_prompt_tokens_total") - before["outrider_prompt_tokens_total"] == read
    reasons = Counter(reason for _, own in answers for reason in own)
    assert reasons["stop"] and reasons["length"]
    for reason, count in ended.items():
        assert server.metric("outrider_requests_total", finish_reason=reason) - count == reasons[reason]


async def test_clients_cannot_add_series(tiny: LiveServer) -> None:
    async with tiny.client() as client:

        async def provoke(number: int) -> None:
            strange = f'm{number}"\\\n😀{"x" * (number % 50)}'
            await client.post("/v1/completions", json={"prompt": "a", "model": strange, "max_tokens": 1})
            await client.post("/v1/chat/completions", json={"messages": [], "model": strange})
            await client.get(f"/v1/models/m{number}")
            await client.get(f"/nothing/{number}/{'y' * (number % 50)}")
            await client.request(f"METHOD{number}", "/v1/completions")
            await client.get("/health", headers={"X-Request-Id": strange.encode().hex()})

        await provoke(0)
        count = sum(1 for _ in samples(tiny.scrape()))
        await asyncio.gather(*(provoke(number) for number in range(1, 200)))
        assert sum(1 for _ in samples(tiny.scrape())) == count
