"""What the load generator sends: prompts, random or from a file, as request bodies."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from server.errors import UserError

Endpoint = Literal["completions", "chat"]
Prompt = str | list[int] | list[dict[str, Any]]
"""Text, token ids, or chat messages."""

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story month lot right study book eye job word business issue side kind head house service friend father power "
    "hour game line end member law car city name team minute idea kid body back parent face others level office door "
    "health person art war history party result change morning reason research girl guy moment air teacher force"
).split()
_SMALLEST_ID = 100
"""Ids below this are often special tokens."""


@dataclass(frozen=True)
class Body:
    """The parts of a request that are the same for all."""

    endpoint: Endpoint
    model: str
    max_tokens: int
    temperature: float
    ignore_eos: bool


def random_prompts(count: int, tokens: int, kind: Literal["ids", "words"], vocab_size: int, seed: int) -> list[Prompt]:
    """`count` different prompts: `tokens` token ids below `vocab_size`, or so many English words."""
    draw = random.Random(seed)
    if kind == "words":
        return [" ".join(draw.choices(_WORDS, k=tokens)) for _ in range(count)]
    lowest = min(_SMALLEST_ID, vocab_size // 2)
    return [[draw.randrange(lowest, vocab_size) for _ in range(tokens)] for _ in range(count)]


def file_prompts(path: Path, count: int) -> list[Prompt]:
    """The first `count` prompts of a file, starting over when it has fewer.

    Each line is text, or JSON: a string, a list of token ids, a list of messages, or an object with `prompt` or
    `messages`.

    Raises:
        UserError: the file cannot be read or holds no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    prompts = [_prompt(line, f"--prompts {path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UserError(f"--prompts {path}: holds no prompt")
    return [prompts[i % len(prompts)] for i in range(count)]


def request_body(body: Body, prompt: Prompt) -> dict[str, Any]:
    """The JSON body of one streamed request.

    Raises:
        UserError: token ids for the chat endpoint, or messages for completions.
    """
    fields: dict[str, Any] = {
        "model": body.model,
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if body.ignore_eos:
        fields["ignore_eos"] = True
    is_messages = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    if body.endpoint == "completions":
        if is_messages:
            raise UserError("the prompts are chat messages: add --endpoint chat")
        return {**fields, "prompt": prompt}
    if is_messages:
        return {**fields, "messages": prompt}
    if isinstance(prompt, list):
        raise UserError("the prompts are token ids, which --endpoint chat cannot take: use --endpoint completions")
    return {**fields, "messages": [{"role": "user", "content": prompt}]}


def _prompt(line: str, place: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return line
    if isinstance(value, dict):
        value = value.get("prompt", value.get("messages"))
    if isinstance(value, str) or (isinstance(value, list) and value and _alike(value)):
        return value
    if isinstance(value, (int, float, bool)):  # a line of text that happens to be JSON
        return line
    raise UserError(f"{place}: must be text, a list of token ids, a list of messages, or an object with one of them")


def _alike(items: list[Any]) -> bool:
    return all(type(item) is int for item in items) or all(isinstance(item, dict) for item in items)
