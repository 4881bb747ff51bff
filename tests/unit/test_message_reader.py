from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.message_piece import CallPiece, MessagePiece
from server.api.message_reader import MessageReader, ReadingRules
from server.api.tool_call_parser import HERMES, LLAMA3_JSON, CallFormat
from server.messages import FinishReason

NAMES = frozenset({"get_time", "add"})


def rules(form: CallFormat | None = None, **more: bool) -> ReadingRules:
    return ReadingRules(form, NAMES, **more)


def read(how: ReadingRules, *pieces: str, finish: FinishReason = "stop") -> MessagePiece:
    """All that comes out, joined."""
    reader = MessageReader(how)
    parts = [reader.feed(piece, None) for piece in pieces] + [reader.feed("", finish)]
    calls: dict[int, CallPiece] = {}
    for piece in (call for part in parts for call in part.calls):
        if piece.name is not None:
            assert piece.index == len(calls) and piece.id is not None and piece.id.startswith("call_")
            calls[piece.index] = CallPiece(piece.index, None, piece.name, piece.arguments)
        else:
            assert piece.id is None and piece.arguments
            calls[piece.index].arguments += piece.arguments
    assert reader.has_calls == bool(calls) or not how.parallel_calls
    return MessagePiece(
        "".join(part.reasoning for part in parts), "".join(part.content for part in parts), list(calls.values())
    )


def calls_of(piece: MessagePiece) -> list[tuple[str | None, str]]:
    return [(call.name, call.arguments) for call in piece.calls]


TIME = '{"name": "get_time", "arguments": {"zone": "Europe/Paris"}}'
ADD = '{"name": "add", "parameters": {"a": 1, "b": [2, {"c": "}"}]}}'


def test_calls_of_hermes_with_content_around() -> None:
    text = f"Let me see.\n<tool_call>\n{TIME}\n</tool_call>\n<tool_call>{ADD}</tool_call>\nDone."
    piece = read(rules(HERMES), text)
    assert calls_of(piece) == [
        ("get_time", '{"zone": "Europe/Paris"}'),
        ("add", '{"a": 1, "b": [2, {"c": "}"}]}'),
    ]
    assert piece.content == "Let me see.Done."


@pytest.mark.parametrize("start", ["", "<|python_tag|>", " \n", "\n<|python_tag|>"])
@pytest.mark.parametrize("between", [";", "; ", "\n", "", "<|python_tag|>"])
def test_calls_of_llama(start: str, between: str) -> None:
    piece = read(rules(LLAMA3_JSON), f"{start}{TIME}{between}{ADD}")
    assert [call.name for call in piece.calls] == ["get_time", "add"]
    assert piece.content == ""


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "add"}', '{"a": 1}'),
        ('{"name":"add"}', "{}"),
        ('{"name": "add", "arguments": null}', "{}"),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"type": "function", "id": null, "name": "add", "parameters": {}}', "{}"),
        ('{"name": "a\\u0064d", "arguments": {"s": "\\\\\\" </tool_call> é"},}', '{"s": "\\\\\\" </tool_call> é"}'),
    ],
)
@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON])
def test_shapes_of_a_call(form: CallFormat, call: str, arguments: str) -> None:
    piece = read(rules(form), f"{form.opening}{call}{form.closing}")
    assert calls_of(piece) == [("add", arguments)]
    assert piece.content == ""


@pytest.mark.parametrize(
    "call",
    [
        "",
        "{}",
        "nothing",
        "[1]",
        '{"name": "rm", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"arguments": {"a": 1}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": "x"}',
        '{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
        '{"name": "add", "name": "add"}',
        '{"name": "add", "mood": "good"}',
        '{"name": "add", "arguments": nil}',
        '{"name" "add"}',
        '{"name": "add"',
        '{"name": "' + "x" * 600,
    ],
)
@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON])
def test_what_is_no_call_is_content(form: CallFormat, call: str) -> None:
    text = f"Well: {form.opening} {call}{form.closing} indeed"
    piece = read(rules(form), text)
    assert piece.calls == []
    assert piece.content == (text if form is HERMES else text.replace(form.opening, ""))


def test_json_that_is_no_call_is_content_for_llama() -> None:
    for text in (
        '{"answer": 42}',
        " \n Hello",
        "; x",
        " " * 300 + "{",
        ' {"name": "Bob", "age": 5}',
        "{",
        "5",
        TIME[:20],
    ):
        assert read(rules(LLAMA3_JSON), text) == MessagePiece(content=text)


def test_a_call_that_breaks_off_keeps_what_was_written() -> None:
    """A missing bracket, arguments that are no JSON, the end of the text: the name is known, the rest is as it is."""
    missing = read(rules(HERMES), '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>')
    assert (calls_of(missing), missing.content) == ([("add", '{"a": 1}')], "")
    wrong = read(rules(HERMES), '<tool_call>{"name": "add", "arguments": {"a": [one}}\n</tool_call> ok')
    assert (calls_of(wrong), wrong.content) == ([("add", '{"a": [one}}')], "ok")
    for finish in ("stop", "length"):
        end = read(rules(HERMES), '<tool_call>{"name": "add", "arguments": {"a": "x', finish=finish)
        assert (calls_of(end), end.content) == ([("add", '{"a": "x')], "")


def test_a_cut_answer_shows_no_part_of_a_mark() -> None:
    text = f"Hi <think>\n<tool_call>{TIME}</tool_call>"
    for length in range(len(text)):
        piece = read(rules(HERMES), text[:length], finish="length")
        assert "Hi <think>\n".startswith(piece.content)
    thought = "<think>\nhm\n</think>\n\nHello"
    for length in range(len(thought)):
        piece = read(rules(split_reasoning=True), thought[:length], finish="length")
        assert "hm".startswith(piece.reasoning) and "Hello".startswith(piece.content)
    assert read(rules(HERMES), "a <tool_", finish="stop").content == "a <tool_"
    assert read(rules(split_reasoning=True), "<thi", finish="stop").content == "<thi"


def test_one_call_when_they_may_not_be_parallel() -> None:
    piece = read(rules(HERMES, parallel_calls=False), f"<tool_call>{TIME}</tool_call><tool_call>{ADD}</tool_call>")
    assert [call.name for call in piece.calls] == ["get_time"]


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nHello", False, "hm", "Hello"),
        ("hm\n\nhm</think>Hello", True, "hm\n\nhm", "Hello"),
        ("<think>hm</think>Hello", True, "hm", "Hello"),
        ("\n<think></think>\n Hello ", False, "", "Hello "),
        (" Hello <think>no</think>", False, "", " Hello <think>no</think>"),
        ("hm, still", True, "hm, still", ""),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("", True, "", ""),
        ("Hello</think>", False, "", "Hello</think>"),
    ],
)
def test_reasoning(text: str, opened: bool, reasoning: str, content: str) -> None:
    how = rules(split_reasoning=True, reasoning_opened=opened)
    assert read(how, text) == MessagePiece(reasoning, content)
    left_out = rules(split_reasoning=True, reasoning_opened=opened, include_reasoning=False)
    assert read(left_out, text) == MessagePiece("", content)


def test_calls_follow_reasoning() -> None:
    piece = read(rules(HERMES, split_reasoning=True), f"<think>I <tool_call></think>\n<tool_call>{TIME}</tool_call>")
    assert (piece.reasoning, piece.content, len(piece.calls)) == ("I <tool_call>", "", 1)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "<tool_", "</thi", "<|py", "<", "{", "}",
    TIME, ADD, '{"name": "', "add", '"', ', "arguments": ', '{"a": "', '\\"', "\\", ": ", ";", " ", "\n", " " * 260,
    "Hello", "é漢🙂", "null", "[", "]", "\u2003",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)
RULES = st.builds(
    ReadingRules,
    st.sampled_from([None, HERMES, LLAMA3_JSON]),
    st.just(NAMES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, how=RULES, data=st.data())
def test_how_the_text_is_cut_changes_nothing(text: str, how: ReadingRules, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    finish = data.draw(st.sampled_from(["stop", "length"]))
    whole = read(how, text, finish=finish)
    assert read(how, *pieces, finish=finish) == whole
    assert read(how, *text, finish=finish) == whole
    if finish == "stop" and not whole.calls and not how.split_reasoning:
        assert whole.content == (text.replace("<|python_tag|>", "") if how.call_format is LLAMA3_JSON else text)


@settings(max_examples=50, deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=3), st.lists(st.none() | st.text(max_size=9) | st.integers())),
    before=st.sampled_from(["", "Sure.\n", "<think>so</think>"]),
    form=st.sampled_from([HERMES, LLAMA3_JSON]),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_arguments_are_the_models_own_characters(
    arguments: dict[str, object], before: str, form: CallFormat, indent: int | None, ascii_only: bool
) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    call = f'{form.opening}\n{{"name": "add", "{form.arguments_key}": {written}}}\n{form.closing}'
    piece = read(rules(form, split_reasoning=True), before + call)
    assert calls_of(piece) == [("add", written)]
