"""Routes for operators and for clients that look around: health, readiness, version, models, metrics."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.openapi import schema_of
from server.api.service_bodies import ModelBody, ModelListBody, StatusBody, VersionBody
from server.api.serving import Serving
from server.messages import EngineReady


async def health(serving: Serving) -> Response:
    """200 while the process lives and the engine, once ready, answers. Raises `ApiError` 503."""
    serving.check_alive()
    return json_response(StatusBody("ok"))


async def ready(serving: Serving) -> Response:
    """200 when requests are welcome. Raises `ApiError` 503 while loading, draining or without an engine."""
    serving.check_ready()
    return json_response(StatusBody("ready"))


async def version(serving: Serving) -> Response:
    """The version of the server."""
    return json_response(VersionBody(serving.context.version))


async def metrics(request: Request, serving: Serving) -> Response:
    """All metrics, in the format that the Accept header asks for."""
    body, content_type = serving.context.render_metrics(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


async def list_models(serving: Serving) -> Response:
    """The served names. Raises `ApiError` 503 while loading."""
    return json_response(ModelListBody([_model(serving, name) for name in serving.context.served_names]))


async def show_model(model_id: str, serving: Serving) -> Response:
    """One of them. Raises `ApiError` 404."""
    return json_response(_model(serving, serving.check_model_name(model_id)))


async def server_info(serving: Serving) -> Response:
    """What the engine built, read back from its layers. Raises `ApiError` 503 while loading."""
    built = msgspec.to_builtins(serving.engine_ready)
    del built["type"]  # the tag of the message
    return json_response(
        {"version": serving.context.version, "served_names": list(serving.context.served_names), **built}
    )


def server_info_schema() -> dict[str, Any]:
    """The JSON schema of that answer."""
    schema = schema_of(EngineReady)
    added: dict[str, Any] = {
        "version": {"type": "string"},
        "served_names": {"type": "array", "items": {"type": "string"}},
    }
    properties = added | {name: field for name, field in schema["properties"].items() if name != "type"}
    required = [*added, *(name for name in schema["required"] if name != "type")]
    return schema | {"properties": properties, "required": required}


def json_response(body: object, headers: dict[str, str] | None = None) -> Response:
    """200 with this body, a struct or plain values."""
    return Response(msgspec.json.encode(body), 200, headers, "application/json")


def _model(serving: Serving, name: str) -> ModelBody:
    context = serving.context
    return ModelBody(
        id=name, created=context.created, root=context.served_names[0], max_model_len=serving.max_model_len
    )
