"""From the fields that bind an answer to a language to the grammar that the engine enforces."""

from __future__ import annotations

import json
from dataclasses import dataclass

from server.api.errors import invalid
from server.api.json_schema import schema_text
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
    param = "response_format.json_schema"
    if asked.type != "json_schema":
        if asked.json_schema is not None:
            raise invalid(f"{param}: only type 'json_schema' has one, the type is {asked.type!r}.", param=param)
        if asked.type == "text":
            return None
        return AskedGrammar(Grammar("json_schema", schema_text({"type": "object"})), "response_format")
    if asked.json_schema is None:
        raise invalid(f"{param} is missing.", param=param, code="missing_required_parameter")
    return AskedGrammar(Grammar("json_schema", asked.json_schema.schema_), f"{param}.schema")


def _of_structured_outputs(asked: StructuredOutputs) -> AskedGrammar:
    given: dict[str, Grammar] = {}
    if asked.json_ is not None:
        given["json"] = Grammar("json_schema", asked.json_)
    if asked.regex is not None:
        given["regex"] = Grammar("regex", asked.regex)
    if asked.choice is not None:
        given["choice"] = Grammar("lark", "start: " + " | ".join(map(json.dumps, asked.choice)))
    if asked.grammar is not None:
        given["grammar"] = Grammar("lark", asked.grammar)
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise invalid(
            f"structured_outputs: give exactly one of json, regex, choice and grammar, got {found}.",
            param="structured_outputs",
        )
    ((name, grammar),) = given.items()
    return AskedGrammar(grammar, f"structured_outputs.{name}")
