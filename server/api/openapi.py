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
    schemas = [_inlined(model.model_json_schema()) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"allOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


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
