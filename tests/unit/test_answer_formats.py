from __future__ import annotations

from pathlib import Path

import pytest

from server.api.answer_formats import answer_formats

TEMPLATES = {file.stem: file.read_text() for file in (Path(__file__).parents[1] / "chat_templates").glob("*.jinja")}
TEMPLATES["glm"] = "<tool_call>{name}\n<arg_key>k</arg_key><arg_value>v</arg_value></tool_call><think>"
TEMPLATES["coder"] = "<tool_call>\n<function=name>\n<parameter=k>v</parameter></function></tool_call>"


@pytest.mark.parametrize(
    ("name", "calls", "reasoning"),
    [
        ("chatml", None, False),
        ("qwen25", "hermes", False),
        ("qwen3", "hermes", True),
        ("llama31", "llama3_json", False),
        ("deepseek", None, True),
        ("glm", None, True),
        ("coder", None, False),
    ],
)
def test_the_template_says_how_the_model_writes(name: str, calls: str | None, reasoning: bool) -> None:
    formats = answer_formats({"default": TEMPLATES[name]}, "auto", "auto")
    assert (formats.calls and formats.calls.name, formats.reasoning) == (calls, reasoning)
    assert formats.describe().count("from the chat template") == 2


def test_a_setting_wins() -> None:
    templates = {"default": TEMPLATES["qwen3"], "tool_use": TEMPLATES["llama31"]}
    assert answer_formats(templates, "auto", "auto").describe() == (
        "tool calls: llama3_json (from the chat template); reasoning: think (from the chat template)"
    )
    assert answer_formats(templates, "hermes", "none").describe() == (
        "tool calls: hermes (--tool-call-parser); reasoning: none (--reasoning-parser)"
    )
    assert answer_formats({}, "none", "think").reasoning
    assert answer_formats({}, "auto", "auto").calls is None
