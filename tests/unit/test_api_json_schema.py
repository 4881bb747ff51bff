"""What a JSON schema in a request may hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.api.json_schema import MAX_DEPTH, MAX_ENUM_VALUES, MAX_OPTIONAL, MAX_PROPERTIES, schema_text


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def properties(count: int, required: int = 0) -> dict[str, Any]:
    names = [f"p{i}" for i in range(count)]
    return {"type": "object", "properties": {name: {} for name in names}, "required": names[:required]}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": ["string", "null"], "title": "t", "description": "d", "default": 1, "x-order": 3, "markdown": "m"},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}},
        {"properties": {"not": {"type": "string"}, "minimun": {}, "uniqueItems": {}}},  # names, no keywords
        {"enum": [{"not": 1}, {"if": 2}]},
        {"type": "integer", "minimum": -(10**30), "maximum": 1e300},  # bounds that forbid nothing
        nested(MAX_DEPTH - 2),
        properties(MAX_PROPERTIES, MAX_PROPERTIES - MAX_OPTIONAL),
    ],
)
def test_schemas_within_the_limits_go_through(schema: Any) -> None:
    text = json.loads(schema_text(schema))
    assert text.pop("x-guidance") == {"whitespace_pattern": r"[ \t\r\n]{1,32}"}
    assert text == ({} if schema is True else schema)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (False, "accepts nothing"),
        ({"not": {}}, "/not: the keyword not is not supported"),
        ({"items": {"uniqueItems": True}}, "/items/uniqueItems: the keyword uniqueItems is not supported"),
        ({"properties": {"a": {"if": {}}}}, "/properties/a/if: the keyword if is not supported"),
        ({"anyOf": [{}, {"contains": {}}]}, "/anyOf/1/contains: the keyword contains"),
        ({"$defs": {"d": {"propertyNames": {}}}}, "/$defs/d/propertyNames"),
        ({"patternProperties": {"^a": {"unevaluatedProperties": False}}}, "unevaluatedProperties is not supported"),
        ({"additionalProperties": {"dependentRequired": {}}}, "dependentRequired is not supported"),
        ({"type": "string", "nullable": True}, 'write "type": [..., "null"]'),
        ({"x-guidance": {"lenient": True}}, "x-guidance is not supported"),
        ({"minimun": 3}, "did you mean 'minimum'?"),
        ({"additionalproperties": False}, "did you mean 'additionalProperties'?"),
        ({"type": "integer", "minimum": 10**30}, "/minimum: 1000000000000000000000000000000 is beyond 64 bits"),
        (
            {"items": {"type": ["integer", "null"], "exclusiveMaximum": -1e30}},
            "/items/exclusiveMaximum: -1e+30 is beyond",
        ),
        ({"items": 5}, "/items: a schema must be an object"),
        ({"enum": "ab"}, "/enum: must be a list"),
        (nested(MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} deep"),
        ({"enum": list(range(MAX_ENUM_VALUES + 1))}, f"more than {MAX_ENUM_VALUES} values"),
        ({"anyOf": [{}] * 5000}, "more than 4096 schemas"),
        (properties(MAX_PROPERTIES + 1), f"at most {MAX_PROPERTIES} are allowed"),
        (properties(MAX_OPTIONAL + 1), f"at most {MAX_OPTIONAL} may be optional"),
        ({"pattern": "a" * 5000}, "5000 characters"),
        ({f"note{i}": 1 for i in range(300)}, "that are no keywords"),
        ({"description": "x" * 300_000}, "at most 262144 are allowed"),
    ],
)
def test_others_are_refused_with_the_place_and_the_reason(schema: Any, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        schema_text(schema)
    assert says in str(refused.value)
