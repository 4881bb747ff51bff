"""32 openai clients at once on the embedded model: streamed and whole, chat and completions."""

from __future__ import annotations

import asyncio

import openai
from live_server import LiveServer

QUESTIONS = ("What is the capital of France?", "Name a colour.", "What is 2 + 2?", "Who wrote Hamlet?")
BEGINNINGS = ("The capital of France is", "Once upon a time", "Water is made of", "def add(a, b):")
MAX_TOKENS = 7


async def complete(client: openai.AsyncOpenAI, prompt: str, stream: bool) -> str:
    fields = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    if not stream:
        answer = await client.completions.create(**fields)
        assert answer.usage is not None and 0 < answer.usage.completion_tokens <= MAX_TOKENS
        return answer.choices[0].text
    chunks = await client.completions.create(**fields, stream=True)
    return "".join([chunk.choices[0].text async for chunk in chunks])


async def chat(client: openai.AsyncOpenAI, question: str, stream: bool) -> str:
    messages = [{"role": "user", "content": question}]
    fields = {"model": "SmolLM2-135M-Instruct", "messages": messages, "max_completion_tokens": MAX_TOKENS}
    if not stream:
        answer = await client.chat.completions.create(**fields, temperature=0)
        return answer.choices[0].message.content or ""
    options = {"include_usage": True}
    chunks = [
        c
        async for c in await client.chat.completions.create(
            **fields, temperature=0, stream=True, stream_options=options
        )
    ]
    assert chunks[-1].usage is not None and chunks[-1].choices == []
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])


async def test_32_clients_at_once_get_the_text_that_one_gets(smollm2: LiveServer) -> None:
    clients = [openai.AsyncOpenAI(base_url=smollm2.url + "/v1", api_key="none", max_retries=0) for _ in range(32)]
    asked = [(complete, beginning, stream) for beginning in BEGINNINGS for stream in (True, False)]
    asked += [(chat, question, stream) for question in QUESTIONS for stream in (True, False)]
    alone = [await ask(clients[0], prompt, stream) for ask, prompt, stream in asked if not stream]
    assert all(alone) and len(set(alone)) == len(alone)
    assert "Paris" in alone[0] and "Paris" in alone[len(BEGINNINGS)]
    # Everything twice: 32 requests.
    together = await asyncio.gather(
        *(ask(client, prompt, stream) for client, (ask, prompt, stream) in zip(clients, asked * 2, strict=True))
    )
    expected = [text for text in alone for _ in (True, False)]
    assert together == expected * 2
    for client in clients:
        await client.close()
