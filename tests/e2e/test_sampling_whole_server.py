"""Sampling over HTTP on the real engine: seeds, choices, bans, stops (cases a6, a10, a19, a23, b14, b16)."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from live_server import LiveServer, stream_events, streamed_text
from streaming_clients import Stream
from tiny_checkpoint import VOCAB_SIZE

PROMPT = [40, 50, 60]


async def choices(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(
        "/v1/completions",
        json={"prompt": PROMPT, "max_tokens": 24, "return_token_ids": True, "ignore_eos": True} | body,
    )
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


@pytest.mark.parametrize("crowded", [False, True])
async def test_a_seeded_answer_is_the_same_alone_and_among_others(
    crowded: bool, request: pytest.FixtureRequest
) -> None:
    server: LiveServer = request.getfixturevalue("tiny_crowded" if crowded else "tiny")
    seeded = {"seed": 42, "temperature": 1.2, "top_p": 0.95}
    async with server.client() as client:
        answers = [await choices(client, **seeded) for _ in range(3)]
        for _ in range(3):
            others = [choices(client, prompt=PROMPT + [i] * 30, max_tokens=40) for i in range(7)]
            among, *_ = await asyncio.gather(choices(client, **seeded), *others)
            answers.append(among)
        unseeded = [await choices(client, temperature=1.2) for _ in range(2)]
    ids = [answer[0]["token_ids"] for answer in answers]
    assert all(own == ids[0] for own in ids)
    assert unseeded[0][0]["token_ids"] != unseeded[1][0]["token_ids"]


async def test_mixed_seeds_change_nothing_for_greedy_neighbours(tiny_crowded: LiveServer) -> None:
    async with tiny_crowded.client() as client:
        prompts = [[i, 2 * i, 3 * i] for i in range(16)]
        alone = [await choices(client, prompt=prompt, temperature=0) for prompt in prompts]
        fields = [{"seed": i} if i % 2 else {} for i in range(16)]
        greedy = [choices(client, prompt=p, temperature=0, **f) for p, f in zip(prompts, fields, strict=True)]
        sampled = [choices(client, prompt=p, temperature=2, **f) for p, f in zip(prompts, fields, strict=True)]
        together = (await asyncio.gather(*greedy, *sampled))[:16]
    assert [c[0]["token_ids"] for c in together] == [c[0]["token_ids"] for c in alone]


async def test_choices_of_one_request_differ_and_come_back(tiny: LiveServer) -> None:
    async with tiny.client() as client:
        first = await choices(client, n=6, seed=7, temperature=1.0)
        again = await choices(client, n=6, seed=7, temperature=1.0)
        single = await choices(client, seed=7, temperature=1.0)
    ids = [choice["token_ids"] for choice in first]
    assert [choice["index"] for choice in first] == list(range(6))
    assert len({tuple(own) for own in ids}) == 6
    assert [choice["token_ids"] for choice in again] == ids
    assert single[0]["token_ids"] == ids[0]


async def test_a_tiny_temperature_is_greedy_and_hurts_nobody(tiny: LiveServer) -> None:
    beside = Stream(tiny, 200, temperature=0, return_token_ids=True)
    async with tiny.client() as client:
        greedy = (await choices(client, temperature=0))[0]["token_ids"]
        extremes: list[dict[str, Any]] = [
            {"temperature": 1e-6},
            {"temperature": 1e-4},
            {"temperature": 5e-324},
            {"temperature": 1, "top_p": 1e-6},
            {"temperature": 2, "top_p": 5e-324},
            {"temperature": 2, "top_k": 1},
            {"temperature": 2, "min_p": 1},
        ]
        answers = await asyncio.gather(*(choices(client, **fields) for fields in extremes))
    for fields, answer in zip(extremes, answers, strict=True):
        assert answer[0]["token_ids"] == greedy, fields
    ids = [token for event in beside.end()[:-1] for choice in event["choices"] for token in choice["token_ids"]]
    assert ids == tiny.token_ids("a", max_tokens=200, ignore_eos=True)


async def test_bans_and_forces(tiny: LiveServer) -> None:
    async with tiny.client() as client:
        greedy = (await choices(client, temperature=0))[0]["token_ids"]
        banned = await choices(client, temperature=0, max_tokens=100, logit_bias={str(greedy[0]): -100})
        assert greedy[0] not in banned[0]["token_ids"]
        forced = await choices(client, temperature=0, logit_bias={"17": 100})
        assert set(forced[0]["token_ids"]) == {17}
        allowed = await choices(client, temperature=2, max_tokens=100, allowed_token_ids=[3, 5, 8])
        assert set(allowed[0]["token_ids"]) == {3, 5, 8}
        words = {token: tiny.post("/detokenize", tokens=[token]).json()["prompt"] for token in greedy}
        token, word = next((token, word) for token, word in words.items() if tiny.encode(word) == [token])
        wordless = await choices(client, temperature=0, max_tokens=100, bad_words=[word])
        assert token not in wordless[0]["token_ids"]


@pytest.mark.parametrize(
    "bias", [{str(VOCAB_SIZE): 1}, {"1000000000": -100}, {"-1": 1}, {"x": 1}, {"5": 101}, {"5": None}, [5]]
)
async def test_a_bad_bias_hurts_nobody(bias: object, tiny: LiveServer) -> None:
    beside = Stream(tiny, 100)
    response = tiny.post("/v1/completions", prompt="a", logit_bias=bias)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("logit_bias")
    assert beside.finish_reason == "length"


async def test_min_tokens_holds_back_stop_strings_and_ids(tiny: LiveServer) -> None:
    async with tiny.client() as client:
        whole = (await choices(client, temperature=0, logprobs=0))[0]
        texts, ids = whole["logprobs"]["tokens"], whole["token_ids"]
        at = next(i for i in range(2, 10) if texts[i].isprintable() and texts[i].isascii() and texts[i])
        (early,) = await choices(client, temperature=0, stop=texts[at])
        assert early["finish_reason"] == "stop" and len(early["token_ids"]) <= at + 1
        (late,) = await choices(client, temperature=0, stop=texts[at], min_tokens=15)
        assert len(late["token_ids"]) >= 15
        assert late["token_ids"] == ids[: len(late["token_ids"])]
        (early,) = await choices(client, temperature=0, stop_token_ids=[ids[at]])
        assert early["finish_reason"] == "stop" and early["stop_reason"] == ids[at]
        (late,) = await choices(client, temperature=0, stop_token_ids=[ids[at]], min_tokens=15)
        assert len(late["token_ids"]) >= 15 and ids[at] not in late["token_ids"][:14]


@pytest.mark.parametrize("seed", range(4))
async def test_streams_of_random_bytes_join_to_the_whole_text(seed: int, tiny: LiveServer) -> None:
    """Case a11."""
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "seed": seed, "temperature": 1.5}
    async with tiny.client() as client:
        events = await stream_events(client, "/v1/completions", body)
    text = streamed_text(events)
    assert text == tiny.complete(**body)["choices"][0]["text"]


async def test_every_stop_string_over_a_token_edge(smollm2: LiveServer) -> None:
    """Streamed and whole, the text ends before the first place where the stop string stands."""
    body = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    choice = smollm2.complete(**body, logprobs=0)["choices"][0]
    text, offsets = choice["text"], choice["logprobs"]["text_offset"]
    assert "Paris" in text
    assert "".join(choice["logprobs"]["tokens"]) == text
    edges = offsets[1:]
    stops = {text[edge - before : edge + after] for edge in edges[::3] for before, after in ((1, 2), (3, 4))}
    assert len(stops) > 5

    async with smollm2.client() as client:

        async def check(stop: str) -> None:
            expected = text[: text.index(stop)]
            response = await client.post("/v1/completions", json=body | {"stop": [stop]})
            whole = response.json()["choices"][0]
            assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (expected, "stop", stop)
            events = await stream_events(client, "/v1/completions", body | {"stop": [stop]})
            assert streamed_text(events) == expected

        await asyncio.gather(*(check(stop) for stop in stops))
