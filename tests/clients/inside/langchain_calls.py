"""LangChain's chat model and completion model for OpenAI's API, against the server at SERVER_URL."""

from __future__ import annotations

import os
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

GREEDY: dict[str, Any] = {
    "model": "tiny",
    "base_url": os.environ["SERVER_URL"] + "/v1",
    "api_key": "none",
    "max_retries": 0,
    "temperature": 0,
    "max_tokens": 32,
}
TALK = [SystemMessage("Be brief."), HumanMessage("Hi"), AIMessage("Hello."), HumanMessage("Where is 漢字?")]


def test_a_streamed_chat_is_the_whole_one() -> None:
    chat = ChatOpenAI(**GREEDY, stream_usage=True)
    whole = chat.invoke(TALK)
    assert whole.content and whole.usage_metadata is not None
    pieces = list(chat.stream(TALK))
    assert "".join(str(piece.content) for piece in pieces) == whole.content
    usages = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert usages[-1]["output_tokens"] == whole.usage_metadata["output_tokens"]


async def test_a_chain_and_a_batch() -> None:
    chain = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "{question}")]) | ChatOpenAI(**GREEDY)
    questions = [{"question": name} for name in ("Who?", "Where?", "Why?")]
    batch = await chain.abatch(questions)
    assert [answer.content for answer in batch] == [(await chain.ainvoke(each)).content for each in questions]


def test_logprobs_and_counting() -> None:
    answer = ChatOpenAI(**GREEDY, logprobs=True, top_logprobs=2, seed=3, n=1).invoke(TALK)
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == answer.response_metadata["token_usage"]["completion_tokens"]
    assert all(len(token["top_logprobs"]) == 2 for token in content)


def test_completions_which_it_sends_as_a_list_with_explicit_nulls() -> None:
    model = OpenAI(**GREEDY)
    assert "".join(model.stream("Sam has 12")) == model.invoke("Sam has 12")
    made = model.generate(["Hi", "Sam has 12"])
    assert len(made.generations) == 2
    assert made.llm_output is not None and made.llm_output["token_usage"]["completion_tokens"] > 0


def test_errors_are_those_of_the_openai_client() -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ChatOpenAI(**{**GREEDY, "temperature": 3}).invoke(TALK)
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(**{**GREEDY, "model": "other"}).invoke(TALK)


class Weather(BaseModel):
    """Report the weather."""

    sky: Literal["clear", "cloudy"]
    rain: bool


SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 1, "max_tokens": 400, "seed": 4}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_of_a_schema(method: Any) -> None:
    assert isinstance(ChatOpenAI(**SAMPLED).with_structured_output(Weather, method=method).invoke(TALK), Weather)


def test_a_tool_is_called_and_the_answer_goes_on_with_its_result() -> None:
    model = ChatOpenAI(**SAMPLED).bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
    whole = model.invoke(TALK)
    assert isinstance(whole, AIMessage) and whole.tool_calls
    assert all(Weather.model_validate(call["args"]) for call in whole.tool_calls)
    pieces = list(model.stream(TALK))
    streamed = pieces[0]
    for piece in pieces[1:]:
        streamed += piece
    assert [call["args"] for call in streamed.tool_calls] == [call["args"] for call in whole.tool_calls]
    results = [ToolMessage("thanks", tool_call_id=call["id"]) for call in whole.tool_calls]
    after = ChatOpenAI(**{**SAMPLED, "max_tokens": 8}).bind_tools([Weather]).invoke([*TALK, whole, *results])
    assert after.usage_metadata is not None and whole.usage_metadata is not None
    assert after.usage_metadata["input_tokens"] > whole.usage_metadata["input_tokens"]
