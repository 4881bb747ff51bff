"""Grammars of calls, followed by llguidance byte by byte; what they let through is read by our own parser."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from server.api.message_reader import MessageReader, ReadingRules
from server.api.tool_call_parser import HERMES, LLAMA3_JSON
from server.api.tool_grammar import CallableFunction, after_reasoning, calls_grammar, guarded_grammar
from server.grammar.source import parser_limits, source_text
from server.messages import Grammar

CLOSED = '"additionalProperties":false'
FUNCTIONS = [
    CallableFunction(
        "add", f'{{"type":"object","properties":{{"a":{{"$ref":"#/$defs/n"}}}},"required":["a"],{CLOSED},'
        '"$defs":{"n":{"type":"integer"}}}'
    ),
    CallableFunction("now", f'{{"type":"object","properties":{{}},{CLOSED}}}'),
]  # fmt: skip
ADD, NOW, WRONG = '{"a": 5}', "{}", '{"a": "five"}'
MARKS = ("<tool_call>", "</tool_call>")


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


class Bytes:
    """A vocabulary of bytes, special tokens and an end."""

    bos_token_id = None

    def __init__(self, special: Sequence[str]) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), *(mark.encode() for mark in special), b"<|end|>"]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def follows(grammar: Grammar, text: str, special: Sequence[str] = ()) -> bool:
    """Whether the whole text belongs to the language."""
    words = Bytes(special)
    tokenizer = LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=words.eos_token_id, slices=[])
    matcher = LLMatcher(tokenizer, source_text(grammar), log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    while text:
        mark = next((mark for mark in special if text.startswith(mark)), None)
        tokens = list(text[0].encode()) if mark is None else [256 + special.index(mark)]
        text = text[1 if mark is None else len(mark) :]
        if not all(matcher.try_consume_tokens([token]) for token in tokens):
            return False
    return matcher.is_accepting()


@pytest.mark.parametrize("special", [(), MARKS])
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_of_hermes(special: Sequence[str], parallel: bool) -> None:
    """The marks are text in some vocabularies and special tokens in others."""
    grammar = calls_grammar(HERMES, FUNCTIONS, parallel=parallel, special_tokens=special)
    assert follows(grammar, hermes("add", ADD), special)
    assert follows(grammar, hermes("now", NOW), special)
    two = f"{hermes('add', ADD)}\n{hermes('now', NOW)}"
    assert follows(grammar, two, special) is parallel
    wrong = ("", "Sure.", hermes("add", WRONG), hermes("sub", ADD), hermes("now", ADD), two[:-1], f"x{two}")
    assert not any(follows(grammar, text, special) for text in wrong)


def test_calls_of_llama() -> None:
    grammar = calls_grammar(LLAMA3_JSON, FUNCTIONS, parallel=True, special_tokens=())
    assert follows(grammar, llama("add", ADD))
    assert follows(grammar, f"{llama('add', ADD)}; {llama('now', NOW)}")
    assert not follows(grammar, llama("add", WRONG))


def test_calls_or_an_answer() -> None:
    answer = Grammar("json_schema", '{"type":"array"}')
    for form, call in ((HERMES, hermes), (LLAMA3_JSON, llama)):
        grammar = calls_grammar(form, FUNCTIONS, parallel=False, special_tokens=(), answer=answer)
        assert follows(grammar, call("add", ADD)) and follows(grammar, "[1]")
        assert not follows(grammar, "1") and not follows(grammar, call("add", WRONG))


@pytest.mark.parametrize("special", [(), MARKS])
def test_text_in_which_calls_are_right(special: Sequence[str]) -> None:
    grammar = guarded_grammar(HERMES, FUNCTIONS, special_tokens=special)
    call = hermes("add", ADD)
    for text in ("", "Hello", "a < b", call, f"I add.\n{call}\n{call}", f"{call} Done.", "漢 <tool"):
        assert follows(grammar, text, special), text
    for text in (hermes("add", WRONG), "<tool_call>x", call[:-14], f"Hi {hermes('sub', ADD)}"):
        assert not follows(grammar, text, special), text


def test_text_or_bare_calls() -> None:
    grammar = guarded_grammar(LLAMA3_JSON, FUNCTIONS, special_tokens=())
    for text in ("", "Hello", " x {", llama("add", ADD), f"{llama('add', ADD)}; {llama('now', NOW)}"):
        assert follows(grammar, text), text
    for text in (llama("add", WRONG), "{", ' {"a": 1}'):
        assert not follows(grammar, text), text


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar("json_schema", '{"type":"object"}'), '{"a": 1}', "[1]"),
        (Grammar("regex", r"a/b\/c|d\\/|\S+\n"), "a/b/c", "a/b"),
        (Grammar("regex", "d\\\\/|x\ny"), "d\\/", "d/"),
        (Grammar("lark", 'start: "a" | B\nB: /b+/'), "bb", "ab"),
        (calls_grammar(HERMES, FUNCTIONS, parallel=True, special_tokens=()), hermes("add", ADD), "Hi"),
        (guarded_grammar(HERMES, FUNCTIONS, special_tokens=()), f"Hi {hermes('add', ADD)}", "<tool_call>x"),
    ],
)
def test_a_language_behind_reasoning(grammar: Grammar, right: str, wrong: str) -> None:
    opened = after_reasoning(grammar, opened=True)
    assert follows(opened, f"Hm <x> {wrong}\n</think>\n\n{right}")
    assert not follows(opened, f"Hm </think>{wrong}")
    maybe = after_reasoning(grammar, opened=False)
    assert follows(maybe, f"<think>\nHm\n</think>\n\n{right}") and follows(maybe, right)
    assert not follows(maybe, wrong)


def test_what_the_grammar_lets_through_is_read_as_calls() -> None:
    for form, call in ((HERMES, hermes), (LLAMA3_JSON, llama)):
        text = form.separator.join([call("add", ADD), call("now", NOW)])
        assert follows(calls_grammar(form, FUNCTIONS, parallel=True, special_tokens=()), text)
        piece = MessageReader(ReadingRules(form, frozenset({"add", "now"}))).feed(text, "stop")
        assert [(one.name, one.arguments) for one in piece.calls] == [("add", ADD), ("now", NOW)]
        assert piece.content == ""
