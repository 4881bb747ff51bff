"""The fields of /v1/completions alone."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema

from server.api.schemas.fields import STRICT, Count, TopLogprobs, refuse

PromptInput = str | list[int]
"""One prompt, as text or as token ids."""


def parse_prompts(value: object) -> tuple[PromptInput, ...]:
    """Take the four shapes: a string, strings, token ids, lists of token ids. Raises a pydantic error."""
    if isinstance(value, str):
        return (_text(value, "the prompt"),)
    if not isinstance(value, list):
        raise refuse("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    if not value:
        raise refuse("the prompt is empty")
    if type(value[0]) is int:
        return (_ids(value, "the prompt"),)
    if isinstance(value[0], str):
        return tuple(_text(item, f"prompt {i}") for i, item in enumerate(value))
    return tuple(_ids(item, f"prompt {i}") for i, item in enumerate(value))


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise refuse(f"{name} is not a string, but the first one is")
    if not value:
        raise refuse(f"{name} is empty")
    return value


def _ids(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise refuse(f"{name} must be a list of token ids (integers)")
    if not value:
        raise refuse(f"{name} is empty")
    return value


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}

Prompts = Annotated[
    tuple[PromptInput, ...],
    PlainValidator(parse_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1},
                _IDS_SCHEMA,
                {"type": "array", "items": _IDS_SCHEMA, "minItems": 1},
            ]
        }
    ),
]


class CompletionFields(BaseModel):
    """What is continued and how much of it comes back."""

    model_config = STRICT

    prompt: Prompts
    max_tokens: Count | None = None
    echo: bool = False
    logprobs: TopLogprobs | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    add_special_tokens: bool = True
