"""What the OpenAPI document says about bodies that the routes read and write themselves."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from pydantic import BaseModel

from server.api.errors import ErrorBody

Responses = dict[int | str, dict[str, Any]]

_MEANINGS = {
    400: "The request can never succeed as it is; `param` names the field.",
    401: "No valid API key was sent.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not JSON in UTF-8.",
    429: "The queue is full, or the key has too many requests open; `Retry-After` says when to ask again.",
    500: "The server failed on this request.",
    503: "The model is loading, the server is shutting down, or the engine is down.",
}


def errors(*statuses: int) -> Responses:
    """The `responses` of a route that answers these statuses with an error object."""
    content = {"application/json": {"schema": schema_of(ErrorBody)}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


def answer(description: str, body: type[Struct] | dict[str, Any], *, chunk: dict[str, Any] | None = None) -> Responses:
    """The `responses` of a route that succeeds with this JSON, or streams events that hold what `chunk` describes."""
    content: dict[str, Any] = {
        "application/json": {"schema": body if isinstance(body, dict) else schema_of(body)},
    }
    if chunk is not None:
        content["text/event-stream"] = {"schema": _event_of(chunk)}
    return {200: {"description": description, "content": content}}


def _event_of(chunk: dict[str, Any]) -> dict[str, Any]:
    """One server-sent event, as Open API 3.1 has it: an object of the event's fields."""
    content = {"anyOf": [chunk, schema_of(ErrorBody)]}
    json_text = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    return {
        "type": "object",
        "description": "Events with one object each, or an error object, then one with `[DONE]`. Lines that begin with "
        "a colon are comments.",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, json_text]}},
        "required": ["data"],
    }


def text_answer(description: str, *media_types: str) -> Responses:
    """The `responses` of a route that succeeds with text."""
    return {
        200: {
            "description": description,
            "content": {media_type: {"schema": {"type": "string"}} for media_type in media_types},
        }
    }


def json_body(*models: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body has the fields of all `models`."""
    schemas = [_nullable(_inlined(model.model_json_schema())) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"allOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


def say_who_may_enter(document: dict[str, Any]) -> None:
    """Add to a whole document that routes with an answer 401 need a bearer token."""
    document.setdefault("components", {})["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for item in document["paths"].values():
        for route in item.values():
            if "401" in route["responses"]:
                route["security"] = [{"bearer": []}]


def schema_of(body: type[Struct], **known: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a struct, without references; `known` are those of fields that msgspec has none for."""
    if not known:
        return _inlined(msgspec.json.schema(body))
    rest = [field for field in msgspec.structs.fields(body) if field.name not in known]
    described = msgspec.defstruct(
        body.__name__,
        [(field.name, field.type) if field.required else (field.name, field.type, field.default) for field in rest],
        kw_only=True,
    )
    schema = schema_of(described)
    return schema | {
        "properties": schema["properties"] | known,
        "required": [*schema["required"], *known],
    }


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
