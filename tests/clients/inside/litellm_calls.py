"""LiteLLM's three providers for OpenAI-compatible servers, against the server at SERVER_URL."""

from __future__ import annotations

import os
from typing import Any, Literal

import litellm
import pytest
from pydantic import BaseModel

URL = os.environ["SERVER_URL"] + "/v1"
CHAT = ("hosted_vllm/tiny", "openai/tiny")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is 漢字?"}]
GREEDY: dict[str, Any] = {
    "api_base": URL,
    "api_key": "none",
    "max_retries": 0,
    "num_retries": 0,
    "temperature": 0,
    "max_tokens": 32,
}


@pytest.mark.parametrize("model", CHAT)
def test_a_streamed_chat_is_the_whole_one(model: str) -> None:
    whole = litellm.completion(model=model, messages=MESSAGES, **GREEDY)
    assert whole.choices[0].message.content
    stream = litellm.completion(
        model=model, messages=MESSAGES, **GREEDY, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usages[-1].completion_tokens == whole.usage.completion_tokens
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == text


@pytest.mark.parametrize("model", CHAT)
async def test_fields_of_both_kinds_pass_through(model: str) -> None:
    answer = await litellm.acompletion(
        model=model,
        messages=MESSAGES,
        **{**GREEDY, "temperature": 1},
        n=2,
        seed=3,
        stop=["zzz"],
        logprobs=True,
        top_logprobs=2,
        presence_penalty=0.5,
        extra_body={"top_k": 40, "min_p": 0.01, "min_tokens": 4},
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.logprobs.content for choice in answer.choices)


@pytest.mark.parametrize("model", ["text-completion-openai/tiny", "hosted_vllm/tiny"])
def test_a_streamed_completion_is_the_whole_one(model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "Sam has 12", **GREEDY}
    whole = litellm.text_completion(**asked)
    assert whole.choices[0].text and whole.usage.completion_tokens <= 32
    text = "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**asked, stream=True))
    assert text == whole.choices[0].text


def test_several_prompts_at_once() -> None:
    answer = litellm.text_completion(model="text-completion-openai/tiny", prompt=["Hi", "Sam"], **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1]


@pytest.mark.parametrize("model", CHAT)
def test_errors_are_of_its_own_classes(model: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(model=model, messages=MESSAGES, **{**GREEDY, "temperature": 3})
    other = model.replace("tiny", "other")
    with pytest.raises(litellm.NotFoundError, match="other"):
        litellm.completion(model=other, messages=MESSAGES, **GREEDY)


async def test_the_router_lists_and_calls() -> None:
    deployment = {"model_name": "any", "litellm_params": {"model": "hosted_vllm/tiny", "api_base": URL}}
    router = litellm.Router([deployment], num_retries=0)
    answer = await router.acompletion("any", messages=MESSAGES, max_tokens=4)
    assert answer.usage.completion_tokens > 0


class Weather(BaseModel):
    """What the answer must hold."""

    sky: Literal["clear", "cloudy"]
    rain: bool


SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 1, "max_tokens": 400, "seed": 4}


@pytest.mark.parametrize("model", CHAT)
def test_an_answer_of_a_schema(model: str) -> None:
    answer = litellm.completion(model=model, messages=MESSAGES, response_format=Weather, **SAMPLED)
    assert Weather.model_validate_json(answer.choices[0].message.content)


@pytest.mark.parametrize("model", CHAT)
def test_a_tool_call_that_is_enforced(model: str) -> None:
    function = {"name": "report", "description": "Reports.", "parameters": Weather.model_json_schema()}
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "tool_choice": "required", **SAMPLED}
    asked["parallel_tool_calls"] = False  # a random model would go on calling
    asked["tools"] = [{"type": "function", "function": function}]
    whole = litellm.completion(**asked)
    assert whole.choices[0].finish_reason == "tool_calls"
    calls = whole.choices[0].message.tool_calls
    assert all(Weather.model_validate_json(call.function.arguments) for call in calls)
    built = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)), messages=MESSAGES)
    streamed = built.choices[0].message.tool_calls
    assert [call.function.arguments for call in streamed] == [call.function.arguments for call in calls]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "thanks"} for call in calls]
    talk = [*MESSAGES, whole.choices[0].message.model_dump(), *results]
    after = litellm.completion(model=model, messages=talk, tools=asked["tools"], **{**SAMPLED, "max_tokens": 8})
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens
