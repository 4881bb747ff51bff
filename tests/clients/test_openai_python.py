"""The openai package for Python: all endpoints, streams, errors, retries, raw headers; and one look at real answers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from client_servers import make_client, serve
from openai.types.chat import ChatCompletion

from tests.e2e.live_server import LiveServer

MESSAGES: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Where is "}, {"type": "text", "text": "漢字?"}]},
]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24}
LONG: dict[str, Any] = {"model": "tiny", "prompt": "Hi", "n": 2, "max_tokens": 20000}
FOREVER: dict[str, Any] = {"ignore_eos": True}


async def accumulated(client: openai.AsyncOpenAI, **asked: Any) -> ChatCompletion:
    """A streamed answer, put together by the client itself."""
    async with client.chat.completions.stream(**asked) as stream:
        async for _ in stream:
            pass
        return stream.current_completion_snapshot


def answers(server: LiveServer, status: int) -> float:
    """How many requests got this status."""
    found = [
        line for line in server.scrape().splitlines() if f'status="{status}"' in line and "_http_requests_" in line
    ]
    return sum(float(line.rpartition(" ")[2]) for line in found)


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["tiny"]
    assert await client.models.retrieve("tiny") == models[0]


@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "Sam"], [70, 71, 72], [[70, 71], [72]]])
async def test_completions_in_four_prompt_shapes(client: openai.AsyncOpenAI, prompt: Any) -> None:
    prompts = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
    answer = await client.completions.create(**GREEDY, prompt=prompt, n=2, logprobs=2, echo=True, user="someone")
    assert [choice.index for choice in answer.choices] == list(range(2 * prompts))
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None  # the first token of the prompt follows nothing
        assert "".join(choice.logprobs.tokens or []) == choice.text
    assert answer.usage is not None and answer.usage.completion_tokens <= 24 * len(answer.choices)


async def test_every_field_that_the_client_knows(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        frequency_penalty=0.5,
        logit_bias={"70": 1},
        logprobs=True,
        top_logprobs=3,
        max_completion_tokens=24,
        metadata={"of": "a test"},
        n=2,
        presence_penalty=-0.5,
        response_format={"type": "text"},
        seed=7,
        service_tier="auto",
        stop=["zzz"],
        store=False,
        temperature=0.7,
        tool_choice="none",
        top_p=0.9,
        user="someone",
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
    whole = await client.completions.create(
        model="tiny",
        prompt="Hi",
        best_of=1,
        frequency_penalty=0.5,
        logit_bias={"70": 1},
        logprobs=3,
        max_tokens=24,
        presence_penalty=-0.5,
        seed=7,
        stop=["zzz", "qqq"],
        suffix="",
        temperature=0.7,
        top_p=0.9,
        user="someone",
    )
    assert whole.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("n", [1, 3])
async def test_a_streamed_chat_is_the_whole_one(client: openai.AsyncOpenAI, n: int) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 64, "temperature": 1.2, "seed": 5, "n": n}
    whole = await client.chat.completions.create(**asked)
    final = await accumulated(client, **asked, stream_options={"include_usage": True})
    assert [c.message.content for c in final.choices] == [c.message.content for c in whole.choices]
    assert [c.finish_reason for c in final.choices] == [c.finish_reason for c in whole.choices]
    assert final.usage is not None and whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


async def test_a_streamed_completion_is_the_whole_one(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "prompt": ["Sam has 12", "漢字"], "max_tokens": 64, "logprobs": 1}
    whole = await client.completions.create(**asked)
    texts, tokens, usages = ["", ""], [0, 0], []
    async for chunk in await client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is not None
            tokens[choice.index] += len(choice.logprobs.tokens or [])
        usages.append(chunk.usage)
    assert texts == [choice.text for choice in whole.choices]
    assert usages[-1] is not None and not any(usages[:-1])
    assert sum(tokens) == usages[-1].completion_tokens


async def test_raw_answers_carry_the_request_id_and_the_fields_that_were_ignored(client: openai.AsyncOpenAI) -> None:
    raw = await client.completions.with_raw_response.create(
        **GREEDY, prompt="Hi", extra_headers={"X-Request-Id": "python-7"}, extra_body={"colour": "red"}
    )
    assert raw.headers["x-request-id"] == raw.request_id == "python-7"
    assert raw.headers["x-outrider-ignored-fields"] == "colour"
    assert raw.parse().choices[0].text == json.loads(raw.text)["choices"][0]["text"]
    with_streaming = client.chat.completions.with_streaming_response
    async with with_streaming.create(**GREEDY, messages=MESSAGES, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert [line async for line in response.iter_lines() if line][-1] == "data: [DONE]"


async def test_extra_fields_pass_through(client: openai.AsyncOpenAI) -> None:
    extra = {"return_token_ids": True, "top_k": 1, "min_tokens": 5, "metrics": True}
    answer = await client.completions.create(**{**GREEDY, "temperature": 1}, prompt="Hi", extra_body=extra)
    choice: Any = answer.choices[0]
    assert answer.usage is not None and len(choice.token_ids) == answer.usage.completion_tokens >= 5
    figures: Any = answer
    assert figures.metrics["speculative_decoding"]["num_spec_tokens"] == 3


async def test_errors_are_of_the_clients_own_classes(client: openai.AsyncOpenAI, narrow: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=3)
    assert (refusal.value.param, refusal.value.code) == ("temperature", "invalid_value")
    assert refusal.value.type == "invalid_request_error"
    assert refusal.value.request_id
    with pytest.raises(openai.BadRequestError, match="65536|context|32768"):
        await client.completions.create(model="tiny", prompt="Hi", max_tokens=10**6)
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="other", prompt="Hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="tiny", input="Hi")
    async with make_client(narrow, key="wrong") as stranger:
        with pytest.raises(openai.AuthenticationError) as unknown:
            await stranger.models.list()
    assert unknown.value.code == "invalid_api_key"


async def test_a_bad_request_is_sent_once(tiny: LiveServer) -> None:
    before = answers(tiny, 400)
    async with make_client(tiny, retries=5) as client:
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="tiny", prompt="Hi", top_p=2)
    assert answers(tiny, 400) == before + 1


async def test_a_429_is_tried_again_until_there_is_room(narrow: LiveServer) -> None:
    async with make_client(narrow) as impatient, make_client(narrow, retries=20) as patient:
        # Another test's stream may have been closed a moment ago: its place may not be free yet.
        holder = await patient.completions.create(**LONG, stream=True, extra_body=FOREVER)
        with pytest.raises(openai.RateLimitError) as refusal:
            await impatient.completions.create(**GREEDY, prompt="Hi")
        assert refusal.value.code == "queue_full"
        assert int(refusal.value.response.headers["retry-after"]) >= 1
        refused = answers(narrow, 429)
        waiting = asyncio.create_task(patient.completions.create(**GREEDY, prompt="Hi"))
        while answers(narrow, 429) == refused:
            await asyncio.sleep(0.05)
        await holder.close()
        assert (await waiting).choices[0].text
    narrow.wait_for(narrow.is_idle)


async def test_a_503_while_loading_is_tried_again(tmp_path: Path, tiny_folder: Path) -> None:
    with serve(tmp_path / "server", str(tiny_folder), "--served-model-name", "tiny", wait=False) as server:
        url = server.url
        async with make_client(server) as impatient, make_client(server, retries=20) as patient:
            with pytest.raises(openai.InternalServerError) as refusal:
                await impatient.completions.create(**GREEDY, prompt="Hi")
            assert (refusal.value.status_code, refusal.value.code) == (503, "loading")
            assert int(refusal.value.response.headers["retry-after"]) >= 1
            assert (await patient.completions.create(**GREEDY, prompt="Hi")).choices[0].text
        assert server.url == url


async def test_leaving_a_stream_frees_the_server(tiny: LiveServer, client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(**LONG, stream=True, extra_body=FOREVER)
    async for _ in stream:
        break
    await stream.close()
    tiny.wait_for(tiny.is_idle)


def test_the_synchronous_client_too(tiny: LiveServer) -> None:
    with openai.OpenAI(base_url=tiny.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**GREEDY, messages=MESSAGES)
        stream = client.chat.completions.create(**GREEDY, messages=MESSAGES, stream=True)
        deltas = itertools.chain.from_iterable(chunk.choices for chunk in stream)
        assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(tmp_path_factory.mktemp("server"), "--num-kv-blocks", "64") as server:
        yield server


async def test_the_default_model_answers_sense(smollm2: LiveServer) -> None:
    question: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    async with make_client(smollm2) as client:
        (model,) = [model.id async for model in client.models.list()]
        asked: dict[str, Any] = {"model": model, "messages": question, "max_tokens": 12, "temperature": 0}
        chat = await client.chat.completions.create(**asked)
        assert "Paris" in (chat.choices[0].message.content or "")
        final = await accumulated(client, **asked)
        assert final.choices[0].message.content == chat.choices[0].message.content
