"""From the fields that bind an answer to a language to the grammar that the engine enforces."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from server.api.errors import ApiError, invalid
from server.api.schemas.sampling import SamplingFields
from server.api.schemas.structured import ResponseFormat, StructuredOutputs
from server.messages import Grammar


@dataclass(frozen=True)
class AskedGrammar:
    """A grammar, and the request's field that asked for it, for errors."""

    grammar: Grammar
    param: str


def grammar_of(fields: SamplingFields) -> AskedGrammar | None:
    """The language that a request asks for; None for plain text. Raises `ApiError` 400."""
    formatted = None if fields.response_format is None else _of_response_format(fields.response_format)
    if fields.structured_outputs is None:
        return formatted
    if formatted is not None:
        raise invalid(
            "structured_outputs: response_format already says what the answer must be; leave one of them out.",
            param="structured_outputs",
        )
    return _of_structured_outputs(fields.structured_outputs)


def _of_response_format(asked: ResponseFormat) -> AskedGrammar | None:
    if asked.type != "json_schema":
        if asked.json_schema is not None:
            raise invalid(
                f"response_format.json_schema: only type 'json_schema' has one, the type is {asked.type!r}.",
                param="response_format.json_schema",
            )
        return None if asked.type == "text" else AskedGrammar(_of_schema({"type": "object"}), "response_format")
    if asked.json_schema is None:
        raise invalid(
            "response_format.json_schema is missing.",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    return AskedGrammar(_of_schema(asked.json_schema.schema_), "response_format.json_schema.schema")


def _of_structured_outputs(asked: StructuredOutputs) -> AskedGrammar:
    given = {
        "json": asked.json_,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        found = f"got {', '.join(named)}" if named else "got none"
        raise invalid(
            f"structured_outputs: give exactly one of json, regex, choice and grammar, {found}.",
            param="structured_outputs",
        )
    param = f"structured_outputs.{named[0]}"
    if asked.regex is not None:
        return AskedGrammar(Grammar("regex", asked.regex), param)
    if asked.grammar is not None:
        return AskedGrammar(Grammar("lark", asked.grammar), param)
    if asked.choice is not None:
        return AskedGrammar(_of_choices(asked.choice), param)
    schema = asked.json_
    if isinstance(schema, str):
        schema = _parsed(schema, param)
    return AskedGrammar(_of_schema(schema), param)


def _of_schema(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema, separators=(",", ":")))


def _of_choices(choices: list[str]) -> Grammar:
    return Grammar("lark", "start: " + " | ".join(map(json.dumps, dict.fromkeys(choices))))


def _parsed(text: str, param: str) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise _no_schema(param) from None
    if not isinstance(schema, dict | bool):
        raise _no_schema(param)
    return schema


def _no_schema(param: str) -> ApiError:
    return invalid(f"{param}: must be a JSON schema: an object, or a string that holds one as JSON.", param=param)
