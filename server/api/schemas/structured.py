"""The fields that bind an answer to a language: response_format and structured_outputs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from server.api.body import parse_object
from server.api.errors import ApiError
from server.api.json_schema import schema_text
from server.api.schemas.fields import STRICT, refuse

_CLOSED = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
"""What is not known here would change the answer: it is refused, not ignored."""

MAX_PATTERN_LENGTH = 8192
MAX_GRAMMAR_LENGTH = 65536
MAX_CHOICES = 4096
MAX_CHOICE_LENGTH = 65536


def _schema(value: object) -> str:
    """The JSON text of a schema that is within the limits."""
    if not isinstance(value, dict | bool):
        raise refuse("must be a JSON schema: an object")
    try:
        return schema_text(value)
    except ValueError as error:
        raise refuse(str(error)) from None


def _schema_or_text(value: object) -> str:
    if isinstance(value, str):
        try:
            return _schema(parse_object(value.encode()))
        except ApiError:
            raise refuse("the string must hold a JSON schema, an object") from None
    return _schema(value)


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise refuse("must be a list of strings that are not empty")
    if len(value) > MAX_CHOICES or sum(map(len, value)) > MAX_CHOICE_LENGTH:
        raise refuse(f"may hold at most {MAX_CHOICES} strings of {MAX_CHOICE_LENGTH} characters together")
    return tuple(dict.fromkeys(value))


SchemaText = Annotated[
    str, PlainValidator(_schema), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}]})
]
SchemaOrText = Annotated[
    str,
    PlainValidator(_schema_or_text),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}]}),
]
Choices = Annotated[
    tuple[str, ...],
    PlainValidator(_choices),
    WithJsonSchema(
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES}
    ),
]


class NamedSchema(BaseModel):
    """A JSON schema as OpenAI's clients send it. It is enforced whether or not `strict` is set."""

    model_config = STRICT

    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    schema_: Annotated[SchemaText, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The language of the answer, in OpenAI's words."""

    model_config = _CLOSED

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(BaseModel):
    """The language of the answer; exactly one of the fields."""

    model_config = _CLOSED

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_LENGTH)] | None = None
    choice: Choices | None = None
    grammar: (
        Annotated[
            str,
            Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH, description="In llguidance's dialect of Lark."),
        ]
        | None
    ) = None
