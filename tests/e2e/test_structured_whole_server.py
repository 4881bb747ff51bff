"""Structured output over HTTP, on a server that speculates: streamed = whole, valid, counted truthfully."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, stream_events, streamed_text

from tests.spec.drafts import write_pairs

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}}
PROMPTS = [[5, 9, 200, 31, 7], [17] * 30, list(range(60, 97))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    pair = write_pairs(tmp_path_factory.mktemp("pairs"))["self"]
    flags = [f"--speculative-config.{key}={value}" for key, value in pair.speculative.items()]
    flags.append("--speculative-config.num_speculative_tokens=4")
    shape = ("--dtype", "float32", "--num-kv-blocks", "400")
    server = LiveServer(tmp_path_factory.mktemp("served"), str(pair.target), *shape, *flags).ready()
    yield server
    server.kill()


def is_pet(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"kind", "age"} and value["kind"] in ("cat", "dog") and 0 <= value["age"] <= 99


async def test_streamed_is_whole_and_valid(server: LiveServer) -> None:
    async with server.client() as client:

        async def one(i: int) -> None:
            body: dict[str, Any] = {"prompt": PROMPTS[i % 3], "max_tokens": 300, "temperature": 1.0, "seed": i, **JSON}
            events = await stream_events(client, "/v1/completions", body)
            whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
            undrafted = (await client.post("/v1/completions", json=body | {"speculative_decoding": False})).json()
            assert whole["text"] == streamed_text(events) == undrafted["choices"][0]["text"]
            assert whole["finish_reason"] == "stop"
            assert is_pet(whole["text"])

        await asyncio.gather(*map(one, range(6)))


def test_choices_n_and_chat(server: LiveServer) -> None:
    asked = {"structured_outputs": {"choice": ["yes", "no"]}, "n": 4, "temperature": 1.5, "max_tokens": 9}
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "?"}], **asked).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(texts) == 4 and set(texts) <= {"yes", "no"}
    assert answer["usage"]["completion_tokens"] == sum(map(len, texts))


def test_counters_agree_with_the_answers(server: LiveServer) -> None:
    name = "outrider_spec_decode_{}_tokens_total"
    before = [server.metric(name.format(kind)) for kind in ("draft", "accepted")]
    answer = server.complete(PROMPTS[0], max_tokens=300, temperature=0, metrics=True, **JSON)
    told = answer["metrics"]["speculative_decoding"]
    after = [server.metric(name.format(kind)) for kind in ("draft", "accepted")]
    assert told["num_draft_tokens"] == told["num_accepted_draft_tokens"] == after[0] - before[0] == after[1] - before[1]
    assert is_pet(answer["choices"][0]["text"])


def test_a_bad_schema_is_refused_and_a_contradiction_told(server: LiveServer) -> None:
    refused = server.post("/v1/completions", prompt="x", structured_outputs={"json": {"uniqueItems": True}})
    assert refused.status_code == 400
    assert "uniqueItems" in refused.json()["error"]["message"]
    banned = server.encode("y")[0]
    stuck = server.post(
        "/v1/completions", prompt="x", structured_outputs={"regex": "y+"}, logit_bias={str(banned): -100}, max_tokens=5
    )
    assert stuck.status_code == 400
    assert "No token is left" in stuck.json()["error"]["message"]
    server.wait_for(server.is_idle)
