"""What load generators need: answers of a set length, usage in every stream, counters before and after a run.

The requests are those of `vllm bench serve` and guidellm, written down here since the programs bring gigabytes; what is
read from /metrics is read the way the first of them does, line by line.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.e2e.live_server import LiveServer

K = 3
STREAMS, TOKENS = 8, 41


def counters(server: LiveServer) -> dict[str, float]:
    """Counters of speculation, and accepted tokens by position, out of the lines that begin with the exact names."""
    found: dict[str, float] = {}
    for line in server.scrape().splitlines():
        if not line.startswith("vllm:spec_decode"):
            continue
        name, value = line.split("{")[0], float(line.split()[-1])
        if 'position="' in line:
            name += "@" + line.split('position="')[1].split('"')[0]
        found[name] = found.get(name, 0) + value
    return found


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of one streamed answer, which must end with [DONE]."""
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def run_load(server: LiveServer, path: str, bodies: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    async with server.client() as client:
        return await asyncio.gather(*(stream(client, path, body) for body in bodies))


async def test_counters_before_and_after_a_run_of_completions(tiny: LiveServer) -> None:
    async with tiny.client() as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
    before = counters(tiny)
    bodies = [
        {
            "model": model["id"],
            "prompt": f"Sam has {i} apples, ",
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": TOKENS,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        for i in range(STREAMS)
    ]
    for events in await run_load(tiny, "/v1/completions", bodies):
        assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == TOKENS
        assert all(event["choices"] and not event.get("usage") for event in events[:-1])
    delta = {name: value - before[name] for name, value in counters(tiny).items()}
    drafts = delta["vllm:spec_decode_num_drafts_total"]
    drafted = delta["vllm:spec_decode_num_draft_tokens_total"]
    accepted = delta["vllm:spec_decode_num_accepted_tokens_total"]
    positions = [delta[f"vllm:spec_decode_num_accepted_tokens_per_pos_total@{i}"] for i in range(K)]
    # The model is its own draft: every token is accepted, and each step makes one more.
    assert accepted == drafted == sum(positions) > 0
    assert positions[0] == drafts
    assert accepted + drafts == STREAMS * (TOKENS - 1)
    assert not any("@" in name and int(name.partition("@")[2]) >= K for name in delta)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_goes_on_with_the_stream(tiny: LiveServer, path: str) -> None:
    chat = path.endswith("chat/completions")
    text = {"messages": [{"role": "user", "content": "Where is Paris?"}]} if chat else {"prompt": "Where is Paris?"}
    limit = {"max_tokens": TOKENS} | ({"max_completion_tokens": TOKENS} if chat else {})
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", **text, **limit, "stream": True, "stream_options": options, "ignore_eos": True}
    for events in await run_load(tiny, path, [body] * STREAMS):
        made = [event["usage"]["completion_tokens"] for event in events]
        assert made == sorted(made) and made[-1] == TOKENS
        assert events[-1]["choices"] == []
        assert len({event["usage"]["prompt_tokens"] for event in events}) == 1


async def test_probes_and_headers_of_a_run(tiny: LiveServer) -> None:
    headers = {"x-request-id": "run-1", "x-correlation-id": "run", "x-session-affinity": "a"}
    async with tiny.client() as client:
        assert (await client.get("/health")).status_code == 200
        for method in ("HEAD", "GET"):
            metrics = await client.request(method, "/metrics")
            assert metrics.status_code == 200
            assert metrics.headers["content-type"].startswith("text/plain")
        answer = await client.post(
            "/v1/completions", json={"model": "tiny", "prompt": [70, 71], "max_tokens": 2}, headers=headers
        )
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "run-1"
