"""What the OpenAPI document says about bodies that the routes parse themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that answers these statuses with an error object."""
    return {
        status: {"description": "An error.", "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
        for status in statuses
    }


def json_body(*models: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body has the fields of all `models`."""
    schemas = [_nullable(_inlined(model.model_json_schema())) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"allOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with `null` allowed for every field that may be left out: it means absent."""
    required = schema.get("required", [])
    fields = schema["properties"].items()
    return schema | {"properties": {name: field if name in required else _or_null(field) for name, field in fields}}


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    about = {key: field[key] for key in ("title", "description", "default") if key in field}
    rest = {key: value for key, value in field.items() if key not in about}
    choices = rest["anyOf"] if rest.keys() == {"anyOf"} else [rest]
    null = {"type": "null"}
    return about | {"anyOf": choices if null in choices else [*choices, null]}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without references: the definitions of these models do not refer to themselves."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            name = str(node.get("$ref", "")).removeprefix("#/$defs/")
            if name in definitions:
                return resolve(definitions[name])
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(item) for item in node] if isinstance(node, list) else node

    resolved: dict[str, Any] = resolve(schema)
    return resolved
