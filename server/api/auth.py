"""API keys: who may use the routes that cost something or show the model."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import ApiError, busy
from server.api.recorder import Recorder

_GUARDED = ("/v1", "/tokenize", "/detokenize", "/tokenizer_info")


class Authentication:
    """ASGI middleware that answers 401 on guarded routes unless a `Bearer` token is one of the keys.

    With `max_inflight` a key that has so many requests open gets 429 for the next one that costs something.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], recorder: Recorder, max_inflight: int | None = None) -> None:
        self._app = app
        # Equal-length digests: neither the length of a key nor its first wrong byte shows in the time taken.
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]
        self._recorder = recorder
        self._max_inflight = max_inflight
        self._inflight = [0] * len(self._digests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it."""
        if scope["type"] != "http" or not self._digests or not is_guarded(scope):
            await self._app(scope, receive, send)
            return
        key = self._key_of(Headers(scope=scope))
        if key is None:
            await self._refuse(_no_key(), scope, receive, send)
        elif scope["method"] != "POST" or self._max_inflight is None:
            await self._app(scope, receive, send)
        elif self._inflight[key] >= self._max_inflight:
            error = busy(
                f"{self._max_inflight} requests of this API key are open, and it may have no more.", "key_limit"
            )
            await self._refuse(error, scope, receive, send)
        else:
            self._inflight[key] += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._inflight[key] -= 1

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if error.rejection is not None:
            self._recorder.rejected(error.rejection)
        await error.response()(scope, receive, send)

    def _key_of(self, headers: Headers) -> int | None:
        """The number of the key that was sent, if it is one."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = _digest(token.strip().encode("latin-1"))  # the bytes that were sent
        # Compare with every key, so that the time does not say which one was near.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return matches.index(True) if scheme.lower() == "bearer" and any(matches) else None


def _no_key() -> ApiError:
    return ApiError(
        401,
        "A valid API key is needed: send it as 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
        rejection="unauthorized",
    )


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
