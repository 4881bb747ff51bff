"""API keys: who may use the routes that cost something or show the model."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import ApiError
from server.api.recorder import Recorder

_GUARDED = ("/v1", "/tokenize", "/detokenize", "/tokenizer_info")


class Authentication:
    """ASGI middleware that answers 401 on guarded routes unless a `Bearer` token is one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], recorder: Recorder) -> None:
        self._app = app
        # Equal-length digests: neither the length of a key nor its first wrong byte shows in the time taken.
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it."""
        if scope["type"] != "http" or not is_guarded(scope) or self._is_allowed(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        self._recorder.rejected("unauthorized")
        error = ApiError(
            401,
            "A valid API key is needed: send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        if not self._digests:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = _digest(token.strip().encode("latin-1"))  # the bytes that were sent
        # Compare with every key, so that the time does not say which one was near.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def is_guarded(scope: Scope) -> bool:
    """Decide by the path that the router sees; the Host header has no say in it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    candidates = [path]
    if root and path.startswith(root):
        candidates.append(path[len(root) :])
    return any(
        candidate == guarded or candidate.startswith(guarded + "/") for candidate in candidates for guarded in _GUARDED
    )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
