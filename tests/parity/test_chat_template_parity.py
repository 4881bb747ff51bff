"""Chat templates in the published formats of several families, rendered as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from server.api.chat_template import ChatTemplates, Conversation
from server.api.errors import ApiError
from server.api.template_renderer import TemplateRenderer

FOLDER = Path(__file__).parents[1] / "chat_templates"
SOURCES = {file.stem: file.read_text() for file in FOLDER.glob("*.jinja")}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a place, in °C.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "default": None}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
ARGUMENTS = {"place": 'Zürich "Oerlikon" <1>', "days": 3}
TALK = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hi <&> 漢"},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "And the weather?"},
]


def called(content: str | None, arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": '{"t": 12}'}
    return [*TALK, {"role": "assistant", "content": content, "tool_calls": [call]}, answer]


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer()


def theirs(name: str, messages: list[dict[str, Any]], **more: Any) -> str:
    (text,), _ = render_jinja_template([messages], chat_template=SOURCES[name], **TOKENS, **more)
    return text


def ours(renderer: TemplateRenderer, name: str, messages: list[dict[str, Any]], **more: Any) -> str:
    return ChatTemplates({"default": SOURCES[name]}, TOKENS, renderer).render(Conversation(messages, **more))


@pytest.mark.parametrize("name", SOURCES)
def test_a_talk(renderer: TemplateRenderer, name: str) -> None:
    for generate in (True, False):
        text = ours(renderer, name, TALK, add_generation_prompt=generate)
        assert text == theirs(name, TALK, add_generation_prompt=generate)


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama31"])
def test_tools_and_their_calls(renderer: TemplateRenderer, name: str) -> None:
    written = json.dumps(ARGUMENTS, ensure_ascii=False)
    for content in ("", "Let me see."):
        text = ours(renderer, name, called(content, written), tools=[TOOL])
        assert text == theirs(name, called(content, ARGUMENTS), tools=[TOOL], add_generation_prompt=True)
    alone = ours(renderer, name, called(None, written), tools=[TOOL])
    assert alone == theirs(name, called("", ARGUMENTS), tools=[TOOL], add_generation_prompt=True)
    assert written in alone


def test_a_template_that_wants_arguments_as_text_gets_them(renderer: TemplateRenderer) -> None:
    written = json.dumps(ARGUMENTS, separators=(",", ":"))
    for content in (None, ""):
        text = ours(renderer, "deepseek", called(content, written))
        assert text == theirs("deepseek", called(None, written), add_generation_prompt=True)
        assert f"```json\n{written}\n```" in text


def test_variables_of_the_request(renderer: TemplateRenderer) -> None:
    for arguments in ({"enable_thinking": False}, {"enable_thinking": True}, {"nobody_knows": [1, {"a": None}]}):
        text = ours(renderer, "qwen3", TALK, arguments=arguments)
        assert text == theirs("qwen3", TALK, add_generation_prompt=True, **arguments)
    arguments = {"builtin_tools": ["brave_search", "code_interpreter"], "date_string": "1 May 2025"}
    text = ours(renderer, "llama31", TALK, arguments=arguments)
    assert text == theirs("llama31", TALK, add_generation_prompt=True, **arguments)


def test_reasoning_of_earlier_answers(renderer: TemplateRenderer) -> None:
    messages = [*TALK, {"role": "assistant", "content": "12", "reasoning_content": "hm\n"}]
    for key in ("reasoning_content", "reasoning"):
        mine = [*TALK, {"role": "assistant", "content": "12", key: "hm\n"}]
        text = ours(renderer, "qwen3", mine, add_generation_prompt=False)
        assert text == theirs("qwen3", messages, add_generation_prompt=False)
        assert "<think>\nhm\n</think>" in text


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("content", ["The weather", "The weather ", "The weather\n\n"])
def test_the_last_message_is_continued(renderer: TemplateRenderer, name: str, content: str) -> None:
    messages = [*TALK, {"role": "assistant", "content": content}]
    text = ours(renderer, name, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == theirs(name, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.rstrip().endswith(content.rstrip())


def test_what_a_template_refuses(renderer: TemplateRenderer) -> None:
    messages = called("", "{}")
    messages[-2]["tool_calls"] *= 2
    with pytest.raises(ApiError, match="only supports single tool-calls at once!"):
        ours(renderer, "llama31", messages)


def test_the_template_for_tools(renderer: TemplateRenderer) -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "{{ tools[0].function.name }}"}, TOKENS, renderer)
    assert templates.render(Conversation(TALK)) == "plain"
    assert templates.render(Conversation(TALK, [TOOL])) == "weather"
