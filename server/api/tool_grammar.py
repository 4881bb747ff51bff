"""Grammars, in llguidance's dialect of Lark, of answers that hold tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from server.api.reasoning import CLOSING, OPENING
from server.api.tool_call_parser import CallFormat
from server.messages import Grammar

MAX_CALLS = 32
"""In one enforced answer: a model that is stuck in calling comes to an end."""
_SPACE = r"SPACE: /\s{0,16}/"
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)


@dataclass(frozen=True)
class CallableFunction:
    """A function on offer."""

    name: str
    schema: str
    """Of its arguments: a JSON schema of an object, as JSON."""


def calls_grammar(
    form: CallFormat,
    functions: Sequence[CallableFunction],
    *,
    parallel: bool,
    special_tokens: Collection[str],
    answer: Grammar | None = None,
) -> Grammar:
    """Nothing but calls; with `answer` such an answer instead of them is right, too.

    Args:
        form: how calls are written.
        functions: on offer, at least one.
        parallel: whether there may be more than one call.
        special_tokens: of the model: a mark among them is a token, not text.
        answer: what may stand in the place of calls.
    """
    more = f" ({json.dumps(form.separator)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    lines = ["start: calls" if answer is None else "start: calls | answer", f"calls: call{more}"]
    opening = "" if form.bare else _mark(form.opening, special_tokens)
    lines.append(f"call: {opening} body")
    lines += _bodies(form, functions, special_tokens)
    if answer is not None:
        lines.append(f"answer: {_nested(answer)}")
    return Grammar("lark", "\n".join(lines))


def guarded_grammar(
    form: CallFormat, functions: Sequence[CallableFunction], *, special_tokens: Collection[str]
) -> Grammar:
    """Any text, in which every call that is begun is a right one."""
    if form.bare:
        lines = [
            "start: PLAIN | calls",
            r"PLAIN: /(\s*[^\s{](?s:.*))?/",
            f"calls: body ({json.dumps(form.separator)} body){{0,{MAX_CALLS - 1}}}",
        ]
    else:
        is_token = form.opening in special_tokens
        lines = [
            "start: (head body)* TEXT",
            f"head{'' if is_token else '[lazy]'}: TEXT {_mark(form.opening, special_tokens)}",
            "TEXT: /(?s:.*)/",
        ]
    return Grammar("lark", "\n".join([*lines, *_bodies(form, functions, special_tokens)]))


def after_reasoning(grammar: Grammar, *, opened: bool) -> Grammar:
    """The same language, behind what the model thinks; `opened`: the prompt has the opening mark already."""
    closing = CLOSING.replace("/", r"\/")
    lines = [
        f"start: thought{'' if opened else '?'} SPACE answer",
        # One lexeme with its opening mark: alone, the mark could be the beginning of an answer, too.
        f"thought[lazy]: /{'' if opened else OPENING}(?s:.*){closing}/",
        _SPACE,
        f"answer: {_nested(grammar)}",
    ]
    return Grammar("lark", "\n".join(lines))


def _bodies(form: CallFormat, functions: Sequence[CallableFunction], special_tokens: Collection[str]) -> list[str]:
    """Rules for what stands behind the opening mark."""
    newline = "" if form.bare else "\n"
    closing = _mark(form.closing, special_tokens) if form.closing else ""
    lines = ["body: " + " | ".join(f"body_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        head = f'{newline}{{"name": {json.dumps(function.name)}, "{form.arguments_key}": '
        lines.append(f"body_{i}: {json.dumps(head)} arguments_{i} {json.dumps('}' + newline)} {closing}")
        lines.append(f"arguments_{i}: %json {function.schema}")
    return lines


def _mark(mark: str, special_tokens: Collection[str]) -> str:
    return mark if mark in special_tokens else json.dumps(mark)


def _nested(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return f"%json {grammar.text}"
        case "regex":
            return f"/{_SLASH.sub(_escaped, grammar.text)}/"
        case "lark":
            return f"%lark {{\n{grammar.text}\n}}"


def _escaped(match: re.Match[str]) -> str:
    """What would end the expression, or its line, in another way of writing it."""
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])
