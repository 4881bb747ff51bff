"""Models of several families as the API sees them: a tiny tokenizer, a template in the family's published format."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from api_server import Api, serve_api
from fake_engine import READY
from tiny_tokenizer import byte_level

from server.checkpoint.tokenizer import TokenizerFiles

TEMPLATES = Path(__file__).parents[1] / "chat_templates"
SPACIOUS = msgspec.structs.replace(READY, max_model_len=8192)


def family(name: str) -> TokenizerFiles:
    """The tiny byte-level tokenizer with the template of a family, such as "qwen3"."""
    return replace(byte_level(), chat_templates={"default": (TEMPLATES / f"{name}.jinja").read_text()})


@asynccontextmanager
async def serve_family(name: str, text: str, **settings: Any) -> AsyncIterator[Api]:
    """A model of a family that answers every request with `text`."""
    async with serve_api(text, files=family(name), ready=SPACIOUS, **settings) as api:
        yield api


async def streamed(api: Api, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed chat."""
    response = await api.http.post("/v1/chat/completions", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The choice that the chunks make, as a whole answer has it, and how many pieces its arguments came in."""
    content, reasoning, finish, logprobs, ids = "", "", [], [], []
    calls: list[dict[str, Any]] = []
    pieces = 0
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            pieces += 1
            if "id" in call:
                assert (call["index"], call["type"]) == (len(calls), "function")
                calls.append({"name": call["function"]["name"], "arguments": ""})
            else:
                assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
        if choice["logprobs"]:
            logprobs += choice["logprobs"]["content"]
        ids += choice.get("token_ids", [])
        finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    (reason,) = finish
    return {
        "content": content,
        "reasoning": reasoning,
        "calls": calls,
        "finish_reason": reason,
        "logprobs": logprobs,
        "token_ids": ids,
        "pieces": pieces,
    }


def whole(choice: dict[str, Any]) -> dict[str, Any]:
    """The same of a choice that came as a whole."""
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [call["function"] for call in message.get("tool_calls", [])],
        "finish_reason": choice["finish_reason"],
        "logprobs": choice["logprobs"]["content"] if choice["logprobs"] else [],
        "token_ids": choice.get("token_ids", []),
    }
