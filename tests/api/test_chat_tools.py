from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from api_server import listen, serve_api
from chat_families import SPACIOUS, family, joined, serve_family, streamed, whole
from openai import AsyncOpenAI

USER = [{"role": "user", "content": "What is 1 + 2?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = '{"a": 1,  "b": 2}'
HERMES_CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA_CALL = f'{{"name": "add", "parameters": {ARGUMENTS}}}'
CALLS = {"qwen25": f"I add.\n{HERMES_CALL}", "qwen3": HERMES_CALL, "llama31": LLAMA_CALL}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("burst", [1, 7])
async def test_a_call_whole_and_streamed(name: str, burst: int) -> None:
    async with serve_family(name, CALLS[name]) as api:
        api.engine.burst = burst
        body = {"messages": USER, "tools": [ADD, NOW], "logprobs": True, "return_token_ids": True}
        answer = await api.chat(**body)
        message = answer["choices"][0]["message"]
        assert message["content"] == ("I add." if name == "qwen25" else None)
        (call,) = message["tool_calls"]
        assert call["id"].startswith("call_") and call["type"] == "function"
        assert call["function"] == {"name": "add", "arguments": ARGUMENTS}
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        stream = joined(await streamed(api, **body))
        assert stream.pop("pieces") >= 1
        assert stream == whole(answer["choices"][0])
        entries = answer["choices"][0]["logprobs"]["content"]
        assert len(entries) == answer["usage"]["completion_tokens"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == CALLS[name]
        assert api.engine.requests[0].params.grammar is None
        prompt = api.files.tokenizer.decode(api.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
        assert '"description": "Adds."' in prompt


async def test_without_tools_the_text_stays_text() -> None:
    async with serve_family("qwen25", HERMES_CALL) as api:
        for extra in ({}, {"tools": [ADD], "tool_choice": "none"}, {"tools": []}, {"tools": [NOW]}):
            choice = (await api.chat(messages=USER, **extra))["choices"][0]
            assert choice["message"] == {"role": "assistant", "content": HERMES_CALL, "refusal": None}
            assert choice["finish_reason"] == "stop"
        prompts = [request.prompt_token_ids for request in api.engine.requests]
        assert prompts[0] == prompts[1] == prompts[2] != prompts[3]


async def test_a_control_token_that_opens_a_call_is_seen() -> None:
    """Llama's mark is a special token, which no text shows."""
    files = family("llama31")
    mark = "<|python_tag|>"
    text = files.tokenizer.from_str(files.tokenizer.to_str())
    text.add_special_tokens([mark])
    files = replace(files, tokenizer=text, special_ids=files.special_ids | {text.token_to_id(mark)})
    for answer, calls, content in ((f"{mark}{LLAMA_CALL}", 1, None), (f"{mark}print(1)", 0, "print(1)")):
        async with serve_api(answer, files=files, ready=SPACIOUS) as api:
            message = (await api.chat(messages=USER, tools=[ADD]))["choices"][0]["message"]
            assert (len(message.get("tool_calls", [])), message["content"]) == (calls, content)


async def test_choices_of_one_request_are_read_apart() -> None:
    async with serve_family("qwen25", HERMES_CALL) as api:
        body = {"messages": USER, "tools": [ADD], "n": 3}
        chunks = await streamed(api, **body)
        assert [joined(chunks, index)["calls"] for index in range(3)] == [[{"name": "add", "arguments": ARGUMENTS}]] * 3
        answer = await api.chat(**body)
        ids = {choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]}
        assert len(ids) == 3


async def test_a_cut_call_says_length() -> None:
    async with serve_family("qwen25", HERMES_CALL) as api:
        tokens = len(api.encode(HERMES_CALL))
        for limit in range(1, tokens):
            body = {"messages": USER, "tools": [ADD], "max_tokens": limit}
            choice = (await api.chat(**body))["choices"][0]
            stream = joined(await streamed(api, **body))
            assert stream.pop("pieces") >= len(stream["calls"])
            assert stream == whole(choice)
            assert choice["finish_reason"] == "length"
            assert stream["content"] == ""
            assert all(ARGUMENTS.startswith(call["arguments"]) for call in stream["calls"])


async def test_parallel_calls_and_one_alone() -> None:
    async with serve_family("qwen25", f"{HERMES_CALL}\n{HERMES_CALL}") as api:
        for parallel, count in ((True, 2), (False, 1)):
            answer = await api.chat(messages=USER, tools=[ADD], parallel_tool_calls=parallel)
            assert len(answer["choices"][0]["message"]["tool_calls"]) == count


async def test_what_must_be_called_is_a_grammar() -> None:
    async with serve_family("qwen25", HERMES_CALL) as api:
        named = {"type": "function", "function": {"name": "now"}}
        for choice in ("required", named):
            await api.chat(messages=USER, tools=[ADD, NOW], tool_choice=choice)
        first, second = (request.params.grammar for request in api.engine.requests)
        assert first is not None and '\\"add\\"' in first.text and '\\"now\\"' in first.text
        assert second is not None and '\\"add\\"' not in second.text and '\\"now\\"' in second.text
        strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
        await api.chat(messages=USER, tools=[strict])
        assert api.engine.requests[-1].params.grammar is not None
        await api.chat(messages=USER, tools=[ADD], response_format={"type": "json_object"})
        both = api.engine.requests[-1].params.grammar
        assert both is not None and "calls | answer" in both.text


async def test_a_model_without_a_format_can_be_made_to_call() -> None:
    async with serve_family("chatml", LLAMA_CALL) as api:
        answer = await api.chat(messages=USER, tools=[ADD], tool_choice="required")
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
        refusal = await api.http.post("/v1/chat/completions", json={"messages": USER, "tools": [ADD]})
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "tools")


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [ADD, {"type": "search", "function": {"name": "x"}}]}, "tools[1].type"),
        ({"tools": [tool(name="")]}, "tools[0].function.name"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool(name="a\n")]}, "tools[0].function.name"),
        ({"tools": [ADD, tool(parameters=[])]}, "tools[1].function.parameters"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"properties": {"a": {"type": "int"}}})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"properties": {"a": 5}})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"required": "a"})]}, "tools[0].function.parameters"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name"),
        ({"tools": [NOW] * 129}, "tools"),
        ({"tools": "add"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [ADD], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        (
            {"tools": [ADD, tool(parameters={"properties": {"a": {"type": "string", "pattern": "("}}})],
             "tool_choice": "required"},
            "tools[1].function.parameters",
        ),
        ({"tools": [tool(parameters={"not": {}})], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0]"),
        ({"messages": [{"role": "assistant"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
         "messages[0].tool_calls[0].function.name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    async with serve_family("qwen25", "Hi") as api:
        response = await api.http.post("/v1/chat/completions", json={"messages": USER, **body})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        assert api.engine.requests == []


async def test_openai_client_runs_a_tool_loop() -> None:
    """The model calls, the client answers, the model speaks: whole and streamed."""

    def script(request: Any) -> list[int]:
        prompt = files.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        text = "It is 3." if "<tool_response>\n3\n</tool_response>" in prompt else CALLS["qwen25"]
        return [*files.tokenizer.encode(text).ids, files.eos_token_ids[0]]

    files = family("qwen25")
    async with serve_api(script, files=files, ready=SPACIOUS) as api, listen(api) as url:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with client:
            messages: list[Any] = list(USER)
            first = (await client.chat.completions.create(model="tiny", messages=messages, tools=[ADD])).choices[0]
            assert first.finish_reason == "tool_calls" and first.message.tool_calls
            messages.append(first.message)
            for call in first.message.tool_calls:
                result = sum(json.loads(call.function.arguments).values())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
            last = (await client.chat.completions.create(model="tiny", messages=messages, tools=[ADD])).choices[0]
            assert (last.finish_reason, last.message.content) == ("stop", "It is 3.")
            async with client.chat.completions.stream(model="tiny", messages=USER, tools=[ADD]) as stream:
                events = [event async for event in stream]
                final = (await stream.get_final_completion()).choices[0]
            assert any(event.type == "tool_calls.function.arguments.delta" for event in events)
            assert final.message.tool_calls[0].function.arguments == ARGUMENTS
            assert (final.finish_reason, final.message.content) == ("tool_calls", "I add.")


async def test_arguments_that_the_model_broke_may_come_back() -> None:
    async with serve_family("qwen25", "Hi") as api:
        for arguments in ('{"a": ', "", "[1]", '{"a": "\\ud800"}'):
            call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}
            messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
            response = await api.http.post("/v1/chat/completions", json={"messages": messages})
            assert response.status_code == (400 if "ud800" in arguments else 200)


async def test_tools_count_in_the_tokens_of_a_conversation() -> None:
    async with serve_family("qwen25", "Hi") as api:
        response = await api.http.post("/tokenize", json={"messages": USER, "tools": [ADD]})
        await api.chat(messages=USER, tools=[ADD])
        assert response.json()["tokens"] == api.engine.requests[0].prompt_token_ids
