"""The outermost layer of the app: request ids, request counts, and the answer when nothing else gave one."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import internal_error
from server.api.recorder import Recorder
from server.logs import request_id as request_in_logs

_log = logging.getLogger(__name__)

_SAFE_ID = re.compile(r"[A-Za-z0-9._:@+/=-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CLIENT_GONE = 499


class Boundary:
    """ASGI middleware around everything else.

    It echoes a safe `X-Request-Id` (or makes one), counts each answer by route template, and turns an exception that
    nobody expected into a 500 that says nothing about it. Behind a proxy that passes a prefix on, `root_path` is that
    prefix: paths are valid with and without it.
    """

    def __init__(self, app: ASGIApp, recorder: Recorder, root_path: str = "") -> None:
        self._app = app
        self._recorder = recorder
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path:
            scope["root_path"] = self._root_path
        request_id = _request_id(Headers(scope=scope))
        said_in_logs = request_in_logs.set(request_id)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode("ascii"))]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass
        except Exception:
            _log.exception("the request failed")
            if status == 0:
                await internal_error().response()(scope, receive, send_with_id)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._recorder.http_request(_route_template(scope), method, status or _CLIENT_GONE)
            request_in_logs.reset(said_in_logs)


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex


def _route_template(scope: Scope) -> str:
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "other"
