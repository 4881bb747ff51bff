"""The product of all sampling fields, drawn at random and run side by side: the engine fails on none of them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx
from live_server import LiveServer
from tiny_checkpoint import VOCAB_SIZE

FIELDS: dict[str, tuple[Any, ...]] = {
    "n": (1, 1, 2, 5),
    "max_tokens": (0, 1, 2, 17, 40),
    "min_tokens": (0, 0, 1, 17),
    "temperature": (0, 5e-324, 1e-4, 0.7, 1, 2),
    "top_k": (-1, 0, 1, 5, VOCAB_SIZE, 10**6),
    "top_p": (5e-324, 0.1, 0.9, 1),
    "min_p": (0, 0.05, 1),
    "presence_penalty": (-2, 0, 2),
    "frequency_penalty": (-2, 0, 2),
    "repetition_penalty": (1e-5, 0.5, 1, 10),
    "logit_bias": ({}, {"0": -100, "5": 100}, {str(i): -100 for i in range(VOCAB_SIZE)}),
    "allowed_token_ids": (None, [1], list(range(VOCAB_SIZE)), [5, 6, 5]),
    "bad_words": ([], ["a"], ["the ", "漢字", " of"]),
    "stop": (None, "a", ["\n", "é", "zzz"]),
    "stop_token_ids": ([], [5], [1, 2, 3, 100]),
    "ignore_eos": (False, True),
    "include_stop_str_in_output": (False, True),
    "skip_special_tokens": (False, True),
    "logprobs": (None, 0, 5, 20),
    "prompt_logprobs": (None, None, 0, 3),
    "echo": (False, True),
    "priority": (0, 0, -5, 2**31 - 1),
    "cache_salt": ("", "x", "🙂"),
    "truncate_prompt_tokens": (None, 1, 20),
}


def draw_request(draw: random.Random) -> dict[str, Any]:
    body = {name: draw.choice(values) for name, values in FIELDS.items() if draw.random() < 0.4}
    prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((1, 2, 16, 33, 90)))]
    return {
        "prompt": draw.choice((prompt, [prompt, [7]], "a b c", ["漢字", "x"])),
        "return_token_ids": True,
        "seed": draw.choice((-(2**63), 0, 5, 2**63 - 1)),
        **body,
    }


def refuse_constant(constant: str) -> None:
    raise AssertionError(f"{constant} in an answer")


@dataclass
class Answer:
    """One choice, whichever way it came."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprob_tokens: list[str] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        self.text += choice["text"]
        self.token_ids += choice["token_ids"]
        self.logprob_tokens += (choice["logprobs"] or {}).get("tokens", [])
        if choice["finish_reason"]:
            self.finish_reasons.append(choice["finish_reason"])


async def send(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[int, Answer] | None:
    """The choices by index, or None for a request that was refused."""
    response = await client.post("/v1/completions", json=body)
    if response.status_code == 400:
        assert response.json()["error"]["param"], (body, response.text)
        return None
    assert response.status_code == 200, (body, response.text)
    if body.get("stream"):
        lines = [line for line in response.text.splitlines() if line]
        assert lines.pop() == "data: [DONE]"
    else:
        lines = [response.text]
    chunks = [json.loads(line.removeprefix("data: "), parse_constant=refuse_constant) for line in lines]
    answers: dict[int, Answer] = defaultdict(Answer)
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        answers[choice["index"]].add(choice)
    return answers


def check(body: dict[str, Any], answers: dict[int, Answer]) -> None:
    """What holds of any answer."""
    prompts = len(body["prompt"]) if isinstance(body["prompt"][0], list) or "漢字" in body["prompt"] else 1
    assert sorted(answers) == list(range(prompts * body.get("n", 1)))
    for answer in answers.values():
        assert body.get("min_tokens", 0) <= len(answer.token_ids) <= body.get("max_tokens", 16)
        assert answer.finish_reasons in (["stop"], ["length"])
        assert not answer.logprob_tokens or "".join(answer.logprob_tokens) == answer.text


async def test_random_requests_side_by_side(tiny_crowded: LiveServer) -> None:
    """Each whole and as a stream at once: the same seed gives the same answer."""
    draw = random.Random(1)
    gate = asyncio.Semaphore(8)

    async def one(body: dict[str, Any]) -> bool:
        async with gate:
            whole, streamed = await asyncio.gather(send(client, body), send(client, body | {"stream": True}))
        assert whole == streamed, body
        if whole is not None:
            check(body, whole)
        return whole is not None

    async with tiny_crowded.client() as client:
        served = await asyncio.gather(*(one(draw_request(draw)) for _ in range(250)))
    assert served.count(True) > 100
    assert tiny_crowded.metric("outrider_requests_total", finish_reason="error") == 0
    tiny_crowded.wait_for(tiny_crowded.is_idle)
    assert "Traceback" not in tiny_crowded.log
