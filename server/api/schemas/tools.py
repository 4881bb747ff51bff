"""The fields of tool calling: which functions there are, and whether one has to be called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema

from server.api.schemas.fields import STRICT, refuse

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,64}$")]
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_MAX_DEPTH = 64


def _parameters(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse("must be a JSON schema: an object")
    if value.get("type", "object") != "object":
        raise refuse(f"arguments are an object, so the schema's type is 'object', got {str(value['type'])[:40]!r}")
    problem = schema_problem(value)
    if problem:
        raise refuse(problem)
    return value


def schema_problem(schema: Mapping[str, Any]) -> str | None:
    """What makes this no JSON schema, if something does: keywords of the wrong shape. Unknown keywords are allowed."""
    pending: list[tuple[object, str, int]] = [(schema, "the schema", 0)]
    while pending:
        node, place, depth = pending.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, Mapping):
            return f"{place} must be an object or a boolean"
        if depth > _MAX_DEPTH:
            return f"the schema is nested more than {_MAX_DEPTH} levels deep"
        for key, value in node.items():
            inside = f"{key!r} of {place}"
            match key:
                case "type":
                    names = value if isinstance(value, list) else [value]
                    if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
                        return f"{inside} must be one of {', '.join(sorted(_TYPES))}, or a list of them"
                case "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas":
                    if not isinstance(value, Mapping):
                        return f"{inside} must be an object of schemas"
                    pending.extend((item, f"{str(name)[:40]!r} in {key}", depth + 1) for name, item in value.items())
                case "anyOf" | "oneOf" | "allOf" | "prefixItems":
                    if not isinstance(value, list) or not value:
                        return f"{inside} must be a list of schemas"
                    pending.extend((item, f"an entry of {key}", depth + 1) for item in value)
                case "items" | "additionalProperties" | "not" | "contains" | "propertyNames" | "if" | "then" | "else":
                    if not (key == "items" and isinstance(value, list)):  # a list there is an older form
                        pending.append((value, inside, depth + 1))
                case "required":
                    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                        return f"{inside} must be a list of names"
                case "enum":
                    if not isinstance(value, list) or not value:
                        return f"{inside} must be a list of values"
    return None


Parameters = Annotated[dict[str, Any], PlainValidator(_parameters), WithJsonSchema({"type": "object"})]


class FunctionFields(BaseModel):
    """A function that the model may call."""

    model_config = STRICT

    name: FunctionName
    description: str | None = None
    parameters: Annotated[Parameters, Field(description="A JSON schema of the arguments, an object.")] | None = None
    strict: bool | None = None


class ToolFields(BaseModel):
    """A tool; functions are the only ones."""

    model_config = STRICT

    type: Literal["function"]
    function: FunctionFields


@dataclass(frozen=True)
class NamedTool:
    """A function that has to be called."""

    name: str


def _choice(value: object) -> str | NamedTool:
    match value:
        case "none" | "auto" | "required":
            return str(value)
        case {"type": "function", "function": {"name": str(name)}} if 0 < len(name) <= 64:
            return NamedTool(name)
    raise refuse(
        'must be \'none\', \'auto\', \'required\' or one function, as {"type": "function", "function": {"name": …}}'
    )


_NAMED_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 64}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
ToolChoice = Annotated[
    str | NamedTool,
    PlainValidator(_choice),
    WithJsonSchema({"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, _NAMED_SCHEMA]}),
]


class CalledFunction(BaseModel):
    """A function that was called, with its arguments as the model wrote them."""

    model_config = STRICT

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str = ""


class CalledTool(BaseModel):
    """A tool call in an earlier answer of the model."""

    model_config = STRICT

    id: Annotated[str, Field(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction
