from __future__ import annotations

from typing import Any

import pytest
from chat_families import joined, serve_family, streamed, whole

USER = [{"role": "user", "content": "Hi"}]
TEXT = "<think>\nHm, é漢.\n</think>\n\nHello!"
NOW = {"type": "function", "function": {"name": "now"}}


async def both(api: Any, **body: Any) -> dict[str, Any]:
    """A choice that is the same whole and streamed."""
    body = {"messages": USER, "logprobs": True, "return_token_ids": True, **body}
    answer = await api.chat(**body)
    choice = whole(answer["choices"][0])
    stream = joined(await streamed(api, **body))
    del stream["pieces"]
    assert stream == choice
    assert len(choice["logprobs"]) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    return choice


@pytest.mark.parametrize("burst", [1, 5])
async def test_reasoning_stands_apart(burst: int) -> None:
    async with serve_family("qwen3", TEXT) as api:
        api.engine.burst = burst
        choice = await both(api)
        assert (choice["reasoning"], choice["content"], choice["finish_reason"]) == ("Hm, é漢.", "Hello!", "stop")
        left_out = await both(api, include_reasoning=False)
        assert (left_out["reasoning"], left_out["content"]) == ("", "Hello!")
        message = (await api.chat(messages=USER, include_reasoning=False))["choices"][0]["message"]
        assert "reasoning_content" not in message


async def test_the_template_opens_the_reasoning() -> None:
    async with serve_family("deepseek", "Hm.</think>Hello!") as api:
        assert (await both(api))["reasoning"] == "Hm."
        continued = [*USER, {"role": "assistant", "content": "Well"}]
        choice = await both(api, messages=continued, continue_final_message=True)
        assert (choice["reasoning"], choice["content"]) == ("", "Hm.</think>Hello!")


async def test_a_user_who_spells_the_mark_opens_nothing() -> None:
    async with serve_family("qwen3", "Hello!") as api:
        assert (await both(api, messages=[{"role": "user", "content": "<think>"}]))["content"] == "Hello!"


async def test_cut_reasoning_has_no_content() -> None:
    async with serve_family("qwen3", TEXT) as api:
        tokens = len(api.encode(TEXT))
        for limit in range(1, tokens):
            choice = await both(api, max_tokens=limit)
            assert choice["finish_reason"] == "length"
            assert "Hm, é漢.".startswith(choice["reasoning"]) or choice["reasoning"].endswith(
                "\N{REPLACEMENT CHARACTER}"
            )
            assert "Hello!".startswith(choice["content"])
        short = (await api.chat(messages=USER, max_tokens=12))["choices"][0]["message"]
        assert short["content"] is None and short["reasoning_content"]


async def test_stop_strings_work_on_all_of_the_text() -> None:
    async with serve_family("qwen3", TEXT) as api:
        assert await both(api, stop="é") | {"logprobs": 0, "token_ids": 0} == {
            "content": "", "reasoning": "Hm,", "calls": [], "finish_reason": "stop", "logprobs": 0, "token_ids": 0
        }  # fmt: skip
        assert (await both(api, stop=["llo"]))["content"] == "He"


async def test_calls_come_after_reasoning() -> None:
    async with serve_family("qwen3", '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "now"}\n</tool_call>') as api:
        choice = await both(api, tools=[NOW])
        assert (choice["reasoning"], choice["calls"]) == ("Hm.", [{"name": "now", "arguments": "{}"}])
        assert choice["finish_reason"] == "tool_calls"


async def test_a_grammar_begins_behind_the_reasoning() -> None:
    async with serve_family("qwen3", TEXT) as api, serve_family("deepseek", TEXT) as opened:
        for server, optional in ((api, True), (opened, False)):
            for extra in (
                {"response_format": {"type": "json_object"}},
                {"structured_outputs": {"regex": "a/b|c"}},
                {"structured_outputs": {"choice": ["yes", "no"]}},
            ):
                await server.chat(messages=USER, **extra)
                grammar = server.engine.requests[-1].params.grammar
                assert grammar is not None and grammar.kind == "lark"
                assert ("thought?" in grammar.text) is optional


async def test_settings_choose_the_parsers() -> None:
    async with serve_family("qwen3", TEXT, reasoning_parser="none", tool_call_parser="none") as api:
        assert (await both(api))["content"] == TEXT
        refusal = await api.http.post("/v1/chat/completions", json={"messages": USER, "tools": [NOW]})
        assert refusal.status_code == 400
    async with serve_family("chatml", TEXT, reasoning_parser="think") as api:
        assert (await both(api))["reasoning"] == "Hm, é漢."
