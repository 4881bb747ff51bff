"""Structured output and tool calls through the openai package: its own helpers make the schemas and read the answers.

The model is tiny and random: that an answer fits is the grammar's doing.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionFunctionToolParam
from pydantic import BaseModel, Field

MESSAGES: list[Any] = [{"role": "user", "content": "What will the weather be in Paris?"}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 1, "max_tokens": 400}


class Weather(BaseModel):
    """What the answer must hold."""

    sky: Literal["clear", "cloudy", "漢字"]
    rain: bool
    words: Annotated[list[Annotated[str, Field(max_length=6)]], Field(max_length=2)]


class Forecast(BaseModel):
    """The forecast of a city."""

    city: Literal["Paris", "Wien"]
    days: Literal[1, 2, 3]


TOOLS: list[ChatCompletionFunctionToolParam] = [
    openai.pydantic_function_tool(Forecast, name="forecast"),
    openai.pydantic_function_tool(Weather, name="report"),
]


@pytest.mark.parametrize("seed", range(4))
async def test_a_parsed_answer(client: openai.AsyncOpenAI, seed: int) -> None:
    whole = await client.chat.completions.parse(**ASKED, seed=seed, response_format=Weather)
    assert whole.choices[0].finish_reason == "stop"
    parsed = whole.choices[0].message.parsed
    assert isinstance(parsed, Weather)
    async with client.chat.completions.stream(**ASKED, seed=seed, response_format=Weather) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed
    assert final.choices[0].message.content == whole.choices[0].message.content


async def test_structured_outputs_beside_openais_fields(client: openai.AsyncOpenAI) -> None:
    # A model of chance may put 32 blanks between any two parts of the JSON.
    asked: dict[str, Any] = {"model": "tiny", "prompt": "A number:", "temperature": 1, "max_tokens": 400}

    async def text(**structured: Any) -> str:
        answer = await client.completions.create(**asked, extra_body={"structured_outputs": structured})
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert re.fullmatch(r"[0-9]{3}-(é|漢)+z", await text(regex="[0-9]{3}-(é|漢){1,3}z"))
    assert await text(choice=["one", "another"]) in ("one", "another")
    assert json.loads(await text(json={"enum": [{"a": [1, None]}]})) == {"a": [1, None]}
    assert await text(grammar='start: "a" ("b" | "c") "d"') in ("abd", "acd")


async def test_a_schema_that_is_none_is_a_bad_request(client: openai.AsyncOpenAI) -> None:
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}}
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.chat.completions.create(**ASKED, response_format=wrong)
    assert (refusal.value.param or "").startswith("response_format")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "report"}}])
async def test_a_call_that_is_enforced(client: openai.AsyncOpenAI, choice: Any) -> None:
    asked = {**ASKED, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 3}
    whole = await client.chat.completions.parse(**asked)
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = whole.choices[0].message.tool_calls or []
    expected = {"forecast": Forecast, "report": Weather}[call.function.name]
    assert isinstance(call.function.parsed_arguments, expected)
    assert choice == "required" or call.function.name == "report"
    assert call.id and call.type == "function"
    async with client.chat.completions.stream(**asked) as stream:
        final = await stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.name == call.function.name
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


async def test_a_conversation_goes_on_after_the_call(client: openai.AsyncOpenAI) -> None:
    first = await client.chat.completions.create(
        **ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=5
    )
    message = first.choices[0].message
    assert message.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'} for call in message.tool_calls]
    talk: list[Any] = [*MESSAGES, message.model_dump(exclude_none=True), *results]
    asked: dict[str, Any] = {**ASKED, "messages": talk, "tools": TOOLS, "max_tokens": 16}
    second = await client.chat.completions.create(**asked, tool_choice="auto", seed=1)
    assert second.usage is not None and first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    without = await client.chat.completions.create(**asked, tool_choice="none", seed=1)
    assert without.choices[0].message.content and not without.choices[0].message.tool_calls
