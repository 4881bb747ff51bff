"""Over a real socket: the openai client, and clients that go away."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from api_server import Api, eventually, listen, serve_api

from server.messages import EngineRequest

MESSAGES = [{"role": "user", "content": "Hi"}]


def endless(_: EngineRequest) -> list[int]:
    return [100, 101, 102]


async def open_request(api: Api, url: str, body: dict[str, object]) -> asyncio.StreamWriter:
    """Send a request by hand and wait until the engine has it; closing the writer is the client going away."""
    host, port = url.removeprefix("http://").split(":")
    before = len(api.engine.requests)
    _, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    writer.write("\r\n".join([*head, "", ""]).encode() + content)
    await eventually(lambda: len(api.engine.requests) > before)
    return writer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("started", [True, False])
async def test_a_client_that_goes_away_frees_the_engine(stream: bool, started: bool) -> None:
    """Case e4."""
    async with serve_api(endless) as api, listen(api) as url:
        api.engine.step_seconds = 0.005
        if not started:
            api.engine.running.clear()
        body = {"prompt": ["Hi", "Hello"], "n": 2, "max_tokens": 100, "ignore_eos": True, "stream": stream}
        writer = await open_request(api, url, body)
        await eventually(lambda: len(api.engine.requests) == 4)
        if started:
            await eventually(lambda: len(api.records.first_tokens) == 4)
        writer.close()
        await eventually(lambda: api.link.open_sequences == 0)
        api.engine.running.set()
        await eventually(lambda: api.engine.open_requests == 0)
        assert [sorted(ids) for ids in api.engine.aborted] == [[r.request_id for r in api.engine.requests]]
        await eventually(lambda: len(api.records.finished) == 4)
        assert {s.finish_reason for s in api.records.finished} == {"abort"}
        assert api.records.generated == sum(s.generation_tokens for s in api.records.finished)
        assert (await api.complete(prompt="Hi", max_tokens=3))["usage"]["completion_tokens"] == 3


async def test_normal_ends_abort_nothing() -> None:
    async with serve_api("Hello world") as api, listen(api) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with client:
            for _ in range(3):
                await client.completions.create(model="tiny", prompt="Hi", n=2)
                async for _ in await client.completions.create(model="tiny", prompt="Hi", stream=True):
                    pass
        assert len(api.engine.requests) == 9
        assert api.engine.aborted == []


async def test_the_openai_client_reads_everything() -> None:
    async with serve_api("Hello 漢字!") as api, listen(api) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            completion = await client.completions.create(model="tiny", prompt="Hi", logprobs=2)
            assert completion.choices[0].text == "Hello 漢字!"
            assert completion.choices[0].logprobs is not None
            chat = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, n=2
            )
            assert [choice.message.content for choice in chat.choices] == ["Hello 漢字!"] * 2
            assert chat.usage is not None
            stream = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == "Hello 漢字!"
            assert chunks[-1].usage is not None
            with pytest.raises(openai.BadRequestError) as refusal:
                await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=3)
            assert (refusal.value.param, refusal.value.code) == ("temperature", "invalid_value")
            assert refusal.value.request_id
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="other", prompt="Hi")


async def test_an_error_inside_a_stream_raises_in_the_client() -> None:
    async with serve_api(endless) as api, listen(api) as url:
        api.engine.step_seconds = 0.005
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(model="tiny", prompt="Hi", max_tokens=100, stream=True)
            with pytest.raises(openai.APIError, match="the engine process died"):
                async for _ in stream:
                    api.link.mark_dead("the engine process died")


async def test_many_streams_at_once_each_get_their_own_text() -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model="tiny", prompt=[number + 3], max_tokens=20, stream=True, extra_body={"ignore_eos": True}
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async with serve_api(lambda request: [request.prompt_token_ids[0] + 60]) as api, listen(api) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            texts = await asyncio.gather(*(one(client, number) for number in range(32)))
        pieces = [api.files.tokenizer.decode([number + 63] * 20) for number in range(32)]
        assert texts == pieces
