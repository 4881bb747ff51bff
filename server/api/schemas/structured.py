"""The fields that bind an answer to a language: response_format and structured_outputs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from server.api.schemas.fields import STRICT, refuse

_CLOSED = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
"""What is not known here would change the answer: it is refused, not ignored."""

MAX_PATTERN_LENGTH = 8192
MAX_GRAMMAR_LENGTH = 65536
MAX_CHOICES = 4096


def _schema(value: object) -> dict[str, Any] | bool:
    if isinstance(value, dict | bool):
        return value
    raise refuse("must be a JSON schema: an object")


SchemaObject = Annotated[
    dict[str, Any] | bool,
    PlainValidator(_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}]}),
]


class NamedSchema(BaseModel):
    """A JSON schema as OpenAI's clients send it. The schema is enforced whether or not `strict` is set."""

    model_config = STRICT

    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    schema_: Annotated[SchemaObject, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The language of the answer in OpenAI's words."""

    model_config = _CLOSED

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(BaseModel):
    """The language of the answer; exactly one of the fields."""

    model_config = _CLOSED

    json_: Annotated[SchemaObject | str | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_LENGTH)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)] | None = None
