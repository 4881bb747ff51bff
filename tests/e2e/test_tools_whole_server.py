"""Calls that have to be made, by models that were never taught to: the grammar makes them right."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import LiveServer, Start

TEMPLATES = Path(__file__).parents[1] / "chat_templates"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Zürich", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city", "days"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
MESSAGES = [{"role": "user", "content": "What is the weather in Paris? Call weather with the city and days."}]


def check(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "now":
        assert arguments == {}
    else:
        assert call.function.name == "weather" and arguments.keys() == {"city", "days"}
        assert arguments["city"] in ("Paris", "Zürich", "Oslo") and 1 <= arguments["days"] <= 14


async def test_a_client_runs_a_loop_with_the_embedded_model(smollm2: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "temperature": 0, "max_tokens": 60}
        named = {"type": "function", "function": {"name": "weather"}}
        answer = await client.chat.completions.create(messages=MESSAGES, tools=[WEATHER], tool_choice=named, **fields)
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        check(call)
        asked = client.chat.completions.stream(messages=MESSAGES, tools=[WEATHER], tool_choice=named, **fields)
        async with asked as stream:
            final = (await stream.get_final_completion()).choices[0]
        assert final.message.tool_calls[0].function.arguments == call.function.arguments
        assert final.finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "It rains in Paris."}
        talk = [*MESSAGES, {"role": "assistant", "content": "Let me see."}, result]
        last = await client.chat.completions.create(messages=talk, **{**fields, "max_tokens": 8})
        assert last.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            await client.chat.completions.create(messages=MESSAGES, tools=[WEATHER], **fields)


@pytest.fixture(scope="module")
def thinker(shared: Start, tiny_folder: Path) -> LiveServer:
    """Random weights behind Qwen3's template, with drafts."""
    speculate = '{"method": "ngram", "num_speculative_tokens": 4}'
    template = str(TEMPLATES / "qwen3.jinja")
    return shared(str(tiny_folder), "--chat-template", template, "--speculative-config", speculate)


async def test_sampled_calls_are_right_whatever_the_model_thinks(thinker: LiveServer) -> None:
    """A model of random weights never ends its thoughts: the prompt does."""
    assert "tool calls: hermes (from the chat template); reasoning: think" in thinker.log
    async with openai.AsyncOpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as client:
        off = {"chat_template_kwargs": {"enable_thinking": False}}

        async def call(seed: int, **more: Any) -> Any:
            answer = await client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                tools=[WEATHER, NOW],
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=1,
                seed=seed,
                max_tokens=300,
                extra_body=off | more,
            )
            return answer.choices[0]

        choices = await asyncio.gather(*map(call, range(12)))
        called = [choice for choice in choices if choice.finish_reason == "tool_calls"]
        assert len(called) >= 6  # some begin to think all the same, and are cut
        for choice in called:
            (one,) = choice.message.tool_calls
            check(one)
        for choice in choices:
            assert choice.message.content in (None, "") or choice.finish_reason == "length"
