"""Prompts from a JSON Lines file: {"messages": [...]} for the chat template, {"prompt": text} to continue as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.checkpoint.tokenizer import TokenizerFiles
from server.errors import UserError


def read_prompts(file: Path, tokenizer: TokenizerFiles, shard: tuple[int, int] = (0, 1)) -> list[list[int]]:
    """The token ids of each line's prompt.

    Args:
        file: JSON Lines.
        tokenizer: the target's.
        shard: (i, n) takes every n-th line from the i-th on.

    Raises:
        UserError: the file cannot be read, a line is not a prompt, or messages meet a model without a chat template.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    prompts: list[Sequence[dict[str, str]] | str] = []
    for number, line in list(enumerate(lines, 1))[shard[0] :: shard[1]]:
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompts.append(entry["messages"] if "messages" in entry else str(entry["prompt"]))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f'{file}:{number}: not a prompt; a line is {{"messages": [{{"role": "user", "content": "…"}}]}} '
                'or {"prompt": "…"}'
            ) from None
    if not prompts:
        raise UserError(f"{file}: holds no prompts")
    messages = [prompt for prompt in prompts if not isinstance(prompt, str)]
    rendered = iter(render(tokenizer, messages) if messages else ())
    encode = tokenizer.tokenizer.encode
    return [
        encode(prompt).ids if isinstance(prompt, str) else encode(next(rendered), add_special_tokens=False).ids
        for prompt in prompts
    ]


def render(tokenizer: TokenizerFiles, conversations: Sequence[Sequence[dict[str, str]]]) -> list[str]:
    """The chat template's text of each conversation, up to where the answer begins.

    Raises:
        UserError: the model has no chat template.
    """
    template = _chat_template(tokenizer)
    return [
        str(template.render(tokenizer.special_tokens, messages=messages, add_generation_prompt=True))
        for messages in conversations
    ]


def _chat_template(tokenizer: TokenizerFiles) -> Any:
    source = tokenizer.chat_templates.get("default")
    if source is None:
        raise UserError('this model has no chat template: give {"prompt": "…"} instead of messages')
    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source)
