from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from api_server import serve_api, shared_renderer
from tiny_tokenizer import byte_level, sentencepiece

from server.api.chat_template import ChatTemplates, Conversation
from server.api.errors import ApiError
from server.api.template_renderer import TemplateRenderer

HI = [{"role": "user", "content": "Hi"}]


async def test_the_template_makes_the_prompt() -> None:
    async with serve_api("Hello!") as api:
        parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
        messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
        body = await api.chat(messages=messages)
        text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        assert api.engine.requests[0].prompt_token_ids == api.encode(text)
        choice = body["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "Hello!", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert api.engine.requests[0].params.max_tokens == 128 - len(api.encode(text))


async def test_one_bos_when_the_tokenizer_adds_it_too() -> None:
    files = byte_level(bos=True)
    async with serve_api(files=files) as api:
        await api.chat(messages=HI)
        await api.chat(messages=HI, add_special_tokens=True)
        await api.chat(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=False)
        assert [request.prompt_token_ids.count(0) for request in api.engine.requests] == [0, 1, 0]


async def test_bytes_of_logprobs_are_the_content() -> None:
    """Case a13."""
    async with serve_api("漢🙂 é<think>") as api:
        for extra in ({}, {"stop": [" é"]}, {"skip_special_tokens": False}):
            body = await api.chat(messages=HI, logprobs=True, top_logprobs=3, **extra)
            choice = body["choices"][0]
            entries = choice["logprobs"]["content"]
            assert bytes(byte for entry in entries for byte in entry["bytes"]) == choice["message"]["content"].encode()
            assert len(entries) == body["usage"]["completion_tokens"]
            assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
            assert all(top["token"] for entry in entries for top in entry["top_logprobs"])
            assert all(bytes(top["bytes"]) != "�".encode() for entry in entries for top in entry["top_logprobs"])


async def test_stream_names_the_role_once_and_joins_to_the_whole() -> None:
    async with serve_api("Hello world, 漢字!") as api:
        common = {"messages": HI, "n": 2, "logprobs": True, "return_token_ids": True, "prompt_logprobs": 1}
        whole = await api.chat(**common)
        response = await api.http.post(
            "/v1/chat/completions", json={**common, "stream": True, "stream_options": {"include_usage": True}}
        )
        blocks = response.text.split("\n\n")
        assert blocks[-2] == "data: [DONE]"
        chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
        for choice in whole["choices"]:
            pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in piece["delta"] for piece in pieces[1:])
            assert "".join(piece["delta"].get("content", "") for piece in pieces) == choice["message"]["content"]
            assert [piece["finish_reason"] for piece in pieces].count(None) == len(pieces) - 1
            contents = [piece["logprobs"]["content"] for piece in pieces if piece["logprobs"]]
            assert sum(contents, []) == choice["logprobs"]["content"]
        assert chunks[-1]["usage"] == whole["usage"]
        prompts = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
        assert prompts == [whole["prompt_token_ids"]]
        assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [
            whole["prompt_logprobs"]
        ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content",
        ),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 128}, "max_completion_tokens"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with serve_api() as api:
        full = body if "messages" in body or not body else {"messages": HI, **body}
        response = await api.http.post("/v1/chat/completions", json=full)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert api.engine.requests == []


async def test_fields_that_change_nothing_are_accepted() -> None:
    async with serve_api("Hello") as api:
        body = await api.chat(
            messages=[{"role": "user", "content": "Hi", "name": "Sam"}],
            tools=[],
            tool_choice="auto",
            response_format={"type": "text"},
            logprobs=None,
            seed=None,
            user="me",
            parallel_tool_calls=True,
            modalities=["text"],
            max_tokens=5,
            max_completion_tokens=5,
            chat_template_kwargs={"enable_thinking": False},
        )
        assert body["choices"][0]["message"]["content"] == "Hello"


async def test_a_model_without_a_template_says_so() -> None:
    async with serve_api(lambda _: [2], files=sentencepiece()) as api:
        response = await api.http.post("/v1/chat/completions", json={"messages": HI})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "no_chat_template")


def render(template: str, **arguments: Any) -> str:
    templates = ChatTemplates({"default": template}, {"bos_token": "<s>"}, shared_renderer())
    return templates.render(Conversation(HI, arguments=arguments))


def test_the_template_language_is_that_of_the_models() -> None:
    loop = "{% for m in messages %}\n  {%- if loop.first %}{{ m | tojson }}{% break %}{% endif %}\n{% endfor %}"
    loop = "{% for m in messages %}\n  {%- if loop.first %}{{ m | tojson }}{% break %}{% endif %}\n{% endfor %}"
    assert render("{{ bos_token }}" + loop) == '<s>{"role": "user", "content": "Hi"}'
    assert render("{% generation %}a{% endgeneration %}") == "a"
    assert render("{{ {'a': '<é>'} | tojson(indent=1) }}") == '{\n "a": "<é>"\n}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ 'on' if thinking else 'off' }}", thinking=True) == "on"
    assert render("{% if tools is none %}none{% endif %}") == "none"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{% for i in range(10000000) %}{% endfor %}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
    ],
)
def test_a_template_that_fails_is_the_requests_fault_and_shows_nothing(template: str, message: str) -> None:
    with pytest.raises(ApiError) as refusal:
        render(template)
    assert refusal.value.status == 400
    assert message in refusal.value.message
    assert "Error" not in refusal.value.message


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 2 ** (10 ** 9) }}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(100) }}",
        "{{ 'x' * 10 ** 11 }}",
        "{{ '\\ud800' }}",
    ],
)
async def test_a_hostile_template_fails_its_own_request_alone(template: str) -> None:
    """In a thread, the second one would hold Python's lock for ever."""
    files = replace(byte_level(), chat_templates={"default": template})
    async with serve_api("Hello", files=files, renderer=TemplateRenderer(cpu_seconds=0.2)) as api:
        chat = asyncio.create_task(api.http.post("/v1/chat/completions", json={"messages": HI}))
        assert (await api.complete(prompt="Hi"))["choices"][0]["text"] == "Hello"
        response = await chat
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
        assert (await api.http.get("/health")).status_code == 200
