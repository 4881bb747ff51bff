"""How the served model writes tool calls and reasoning: asked for by a setting, or seen in its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.api.tool_call_parser import CALL_FORMATS, HERMES, LLAMA3_JSON, CallFormat

_OTHER_CALLS = ("<function=", "<arg_key>")
"""In templates of models that put something else than JSON between Hermes' marks."""


@dataclass(frozen=True)
class AnswerFormats:
    """What to look for in answers."""

    calls: CallFormat | None
    calls_source: str
    """Who says so, for people."""
    reasoning: bool
    """Whether the model thinks between marks before it answers."""
    reasoning_source: str

    def describe(self) -> str:
        """One line for the start-up log."""
        calls = "none" if self.calls is None else self.calls.name
        reasoning = "think" if self.reasoning else "none"
        return f"tool calls: {calls} ({self.calls_source}); reasoning: {reasoning} ({self.reasoning_source})"


def answer_formats(templates: Mapping[str, str], tool_call_parser: str, reasoning_parser: str) -> AnswerFormats:
    """Decide for a model with these chat templates; the parsers are names, "none" or "auto"."""
    default = templates.get("default", next(iter(templates.values()), ""))
    with_tools = templates.get("tool_use", default)
    if tool_call_parser == "auto":
        calls, calls_source = _calls_of(with_tools), "from the chat template"
    else:
        calls, calls_source = CALL_FORMATS.get(tool_call_parser), "--tool-call-parser"
    if reasoning_parser == "auto":
        reasoning, reasoning_source = "<think>" in default or "</think>" in default, "from the chat template"
    else:
        reasoning, reasoning_source = reasoning_parser == "think", "--reasoning-parser"
    return AnswerFormats(calls, calls_source, reasoning, reasoning_source)


def _calls_of(template: str) -> CallFormat | None:
    if HERMES.opening in template:
        return None if any(mark in template for mark in _OTHER_CALLS) else HERMES
    is_llama = LLAMA3_JSON.opening in template or "<|start_header_id|>" in template
    return LLAMA3_JSON if is_llama and '"parameters"' in template and '"name"' in template else None
