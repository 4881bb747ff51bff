"""The fields of /v1/chat/completions alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema

from server.api.schemas.fields import STRICT, Positive, TopLogprobs, refuse

_RESERVED_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})


def _content(value: object) -> str:
    """Text, or parts of type text, which are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse("must be a string or a list of content parts")
    texts = []
    for part in value:
        if not isinstance(part, dict):
            raise refuse("a content part must be an object")
        if part.get("type") != "text":
            kind = str(part.get("type"))[:40]
            raise refuse(f"content parts of type {kind!r} are not supported, only 'text'")
        text = part.get("text")
        if not isinstance(text, str):
            raise refuse("a text part needs a string as its text")
        texts.append(text)
    return "".join(texts)


def _template_arguments(value: object) -> dict[str, Any]:
    """Plain values only: a template works on them, and its time must stay bounded."""
    if not isinstance(value, dict) or len(value) > 32:
        raise refuse("must be an object of at most 32 plain values")
    for name, item in value.items():
        if not name.isidentifier() or name in _RESERVED_ARGUMENTS:
            raise refuse(f"{name[:40]!r} is not a name that a request may set")
        small = isinstance(item, int | float) and abs(item) < 2**31
        if not (item is None or small or (isinstance(item, str) and len(item) <= 1024)):
            raise refuse(f"the value of {name[:40]!r} must be a boolean, a short string or a number")
    return value


Content = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
            ]
        }
    ),
]
TemplateArguments = Annotated[
    dict[str, Any],
    PlainValidator(_template_arguments),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "maxProperties": 32,
        }
    ),
]


class ChatMessage(BaseModel):
    """One turn of the conversation."""

    model_config = STRICT

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None


class ChatFields(BaseModel):
    """The conversation and how much of the answer comes back."""

    model_config = STRICT

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=65536, fail_fast=True)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: TemplateArguments = {}
