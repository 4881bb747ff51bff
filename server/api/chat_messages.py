"""Messages in the shape that chat templates expect, which differs between families of models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Taste:
    """How a template likes a message with tool calls."""

    arguments_as_text: bool
    """The arguments as the JSON that the model wrote; otherwise as the object that it stands for."""
    missing_content: str | None
    """The content of a message that has calls alone."""


TASTES = (Taste(False, ""), Taste(False, None), Taste(True, ""), Taste(True, None))
"""Tried in this order."""
DEFAULT_TASTE = TASTES[0]


def template_messages(
    messages: Sequence[Mapping[str, Any]], taste: Taste, *, knows_developer: bool
) -> list[dict[str, Any]]:
    """Fresh messages for a template; most templates know the developer by an older name only."""
    made = []
    for message in messages:
        fresh = dict(message)
        if fresh["role"] == "developer" and not knows_developer:
            fresh["role"] = "system"
        if "tool_calls" in fresh:
            fresh["tool_calls"] = [_call(call, taste) for call in fresh["tool_calls"]]
            if not fresh.get("content"):
                fresh["content"] = taste.missing_content
        elif fresh.get("content") is None:
            fresh["content"] = ""
        reasoning = fresh.pop("reasoning", None)
        if "reasoning_content" not in fresh and reasoning is not None:
            fresh["reasoning_content"] = reasoning
        if "reasoning_content" in fresh:
            fresh["thinking"] = fresh["reasoning_content"]  # what some templates call it
        made.append(fresh)
    return made


def probe_messages() -> list[dict[str, Any]]:
    """A conversation with a tool call whose text shows whether a template understood it."""
    call = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": '{"needle": "hay"}'}}
    return [{"role": "user", "content": "find"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


def suits(text: str) -> bool:
    """Whether the rendered probe shows the call's arguments, and not as Python or as JSON inside JSON."""
    return "needle" in text and "hay" in text and "{'needle'" not in text and '\\"needle\\"' not in text


def _call(call: Mapping[str, Any], taste: Taste) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not taste.arguments_as_text:
        arguments = _parsed(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """The object; what is none, as models write it now and then, stays as it is."""
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
