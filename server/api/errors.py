"""The one shape of every error answer, and the exceptions that become one."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from server.api.recorder import RejectionReason


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inside of an error answer, as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """An error answer, and the `data:` object of an error inside a stream."""

    error: ErrorDetail


_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """A request that gets an error answer. The message is for the client: no class names, paths or tracebacks."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        rejection: RejectionReason | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.rejection: RejectionReason | None = rejection

    def body(self) -> bytes:
        """The JSON of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, kind, self.param, self.code)))

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.body(), self.status, self.headers, "application/json")


def invalid(message: str, *, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A request that can never succeed as it is: 400."""
    return ApiError(400, message, param=param, code=code, rejection="invalid")


def unavailable(message: str, reason: RejectionReason, retry_after: int = 5) -> ApiError:
    """A server that cannot take the request now but may later: 503 with Retry-After (seconds)."""
    return ApiError(503, message, code=reason, headers={"Retry-After": str(retry_after)}, rejection=reason)


def busy(message: str, reason: RejectionReason = "queue_full", retry_after: int = 1) -> ApiError:
    """A server or a key with enough to do for now: 429 with Retry-After (seconds)."""
    return ApiError(429, message, code=reason, headers={"Retry-After": str(retry_after)}, rejection=reason)


def internal_error() -> ApiError:
    """A fault of the server; what it was is in the log only."""
    return ApiError(500, "The server failed while it worked on this request.", code="internal_error")
