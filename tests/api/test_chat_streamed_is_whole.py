"""A streamed chat joined is the whole one: random texts, token by token or in bursts, with every reading of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from api_server import Api, serve_api
from chat_families import SPACIOUS, family, joined, streamed, whole
from hypothesis import given, settings
from hypothesis import strategies as st

USER = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]
FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<thi", "</tool", "\n", "  ", "Hello é漢🙂",
    '{"name": "add", "arguments": {"a": "é\\"}"}}', '{"name": "now", "parameters": {}}', '{"name": "', "{", "}", ";",
]  # fmt: skip
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.just(TOOLS),
        "parallel_tool_calls": st.booleans(),
        "include_reasoning": st.booleans(),
        "logprobs": st.just(True),
        "return_token_ids": st.just(True),
        "n": st.just(2),
        "max_tokens": st.integers(8, 40),
        "stop": st.sampled_from(["}", "llo", "é", "</th", ["\n\n", '"a"']]),
        "min_tokens": st.integers(0, 8),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "continue_final_message": st.just(False),
    },
)


@pytest.mark.parametrize("name", ["qwen3", "llama31", "deepseek"])
def test_the_stream_is_the_whole(name: str) -> None:
    files = family(name)
    script: list[int] = []

    async def compare(api: Api, fields: dict[str, Any], burst: int) -> None:
        api.engine.burst = burst
        if name == "deepseek":  # its template has no calls
            fields.pop("tools", None)
        answer = await api.chat(messages=USER, **fields)
        chunks = await streamed(api, messages=USER, **fields)
        for choice in answer["choices"]:
            stream = joined(chunks, choice["index"])
            del stream["pieces"]
            assert stream == whole(choice)

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        server = serve_api(lambda _: script, files=files, ready=SPACIOUS)
        api = runner.run(stack.enter_async_context(server))

        @settings(max_examples=25, deadline=None)
        @given(st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join), FIELDS, st.integers(1, 6))
        def check(text: str, fields: dict[str, Any], burst: int) -> None:
            script[:] = [*files.tokenizer.encode(text, add_special_tokens=False).ids, files.eos_token_ids[0]]
            runner.run(compare(api, fields, burst))

        try:
            check()
        finally:
            runner.run(stack.aclose())
