"""Prompts from a JSON Lines file: {"messages": [...]} for the chat template, {"prompt": text} to continue as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.checkpoint.tokenizer import TokenizerFiles
from server.errors import UserError


def read_prompts(file: Path, tokenizer: TokenizerFiles) -> list[list[int]]:
    """The token ids of each line's prompt.

    Raises:
        UserError: the file cannot be read, a line is not a prompt, or messages meet a model without a chat template.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    prompts: list[Sequence[dict[str, str]] | str] = []
    for number, line in enumerate(lines, 1):
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
    template: Any = None
    if not all(isinstance(prompt, str) for prompt in prompts):
        template = _chat_template(tokenizer)
    texts = [
        prompt
        if isinstance(prompt, str)
        else str(template.render(tokenizer.special_tokens, messages=prompt, add_generation_prompt=True))
        for prompt in prompts
    ]
    chat = [not isinstance(prompt, str) for prompt in prompts]
    return [
        tokenizer.tokenizer.encode(text, add_special_tokens=not rendered).ids
        for text, rendered in zip(texts, chat, strict=True)
    ]


def _chat_template(tokenizer: TokenizerFiles) -> Any:
    """Compiled once: it makes the text of messages, up to where the answer begins."""
    source = tokenizer.chat_templates.get("default")
    if source is None:
        raise UserError('this model has no chat template: give {"prompt": "…"} instead of messages')
    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source)
