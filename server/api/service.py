"""Routes for operators and for clients that look around: health, readiness, version, models, metrics."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.errors import unavailable
from server.api.serving import Serving


async def health(serving: Serving) -> Response:
    """200 while the process lives and the engine, once ready, answers. Raises `ApiError` 503."""
    serving.check_alive()
    return _json({"status": "ok"})


async def ready(serving: Serving) -> Response:
    """200 when requests are welcome. Raises `ApiError` 503 while loading, draining or without an engine."""
    serving.check_ready()
    return _json({"status": "ready"})


async def version(serving: Serving) -> Response:
    """The version of the server."""
    return _json({"version": serving.context.version})


async def metrics(request: Request, serving: Serving) -> Response:
    """All metrics, in the format that the Accept header asks for."""
    body, content_type = serving.context.render_metrics(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


async def list_models(serving: Serving) -> Response:
    """The served names. Raises `ApiError` 503 while loading."""
    return _json({"object": "list", "data": [_model(serving, name) for name in serving.context.served_names]})


async def show_model(model_id: str, serving: Serving) -> Response:
    """One of them. Raises `ApiError` 404."""
    return _json(_model(serving, serving.check_model_name(model_id)))


async def server_info(serving: Serving) -> Response:
    """What the engine built, read back from its layers. Raises `ApiError` 503 while loading."""
    engine_ready = serving.context.engine.ready
    if engine_ready is None:
        raise unavailable("The model is still loading.", "loading")
    built = msgspec.to_builtins(engine_ready)
    built.pop("type", None)
    return _json({"version": serving.context.version, "served_names": list(serving.context.served_names), **built})


def _model(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.context.created,
        "owned_by": "outrider",
        "root": serving.context.served_names[0],
        "parent": None,
        "max_model_len": serving.max_model_len,
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
