"""Reading a request body and turning it into a JSON object, with limits."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from server.api.errors import ApiError, invalid
from server.api.large_body import NumberList, split_body

MAX_BODY_BYTES = 32 * 1024 * 1024
_LARGE_BYTES = 64 * 1024
_IDLE_SECONDS = 30
_SEARCH_BYTES = 1024 * 1024

T = TypeVar("T")


async def read_request(request: Request, load: Callable[[bytes], T]) -> T:
    """Read the body and `load` it, in a thread when it is large.

    Raises `ApiError` (408, 413, 415, 429, or what `load` raises) and `ClientDisconnect`.
    """
    _check_headers(request)
    body = await _read_body(request)
    request.state.has_large_body = len(body) > _LARGE_BYTES
    return await asyncio.to_thread(load, body) if has_large_body(request) else load(body)


def has_large_body(request: Request) -> bool:
    """Whether the body that was read takes long to work on."""
    return bool(request.state.has_large_body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object (of equal keys the last wins). Raises `ApiError` 400 that names the field where possible."""
    lists: dict[str, NumberList] = {}
    if len(body) > _LARGE_BYTES:
        large = split_body(body)
        body, lists = large.rest, large.lists
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise invalid("The body is nested too deeply.", code="invalid_json") from None
    except msgspec.MsgspecError as error:
        field = _unreadable_field(body)
        if field is not None:
            name, reason = field
            raise invalid(f"{name}: {reason}", param=name, code="invalid_json") from None
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    for name, numbers in lists.items():
        if value[name] is None:  # else the field is there once more, and the last one counts
            value[name] = numbers
    return value


def _check_headers(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json")
    kind, _, parameters = content_type.partition(";")
    kind = kind.strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, "The body must be JSON: send it with 'Content-Type: application/json'.")
    charset = parameters.partition("charset=")[2].split(";")[0].strip(' "').lower()
    if charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise ApiError(415, "The body must be UTF-8.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "A compressed body is not supported: send it without Content-Encoding.")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        raise _too_large()


async def _read_body(request: Request) -> bytes:
    """Read from the connection; unlike Starlette's reader this one stops at the limit."""
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(_IDLE_SECONDS):
                message = await request.receive()
        except TimeoutError:
            raise ApiError(408, f"Nothing of the body came for {_IDLE_SECONDS} seconds.", code="too_slow") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large() -> ApiError:
    return ApiError(413, f"The body is larger than {MAX_BODY_BYTES // (1024 * 1024)} MiB.", code="body_too_large")


def _unreadable_field(body: bytes) -> tuple[str, str] | None:
    """Name the top-level field that strict JSON refuses (NaN, infinities, lone surrogates), if that is the trouble."""
    if len(body) > _SEARCH_BYTES:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    for key, item in value.items():
        reason = _unreadable(item)
        if reason is not None and key.isidentifier():
            return key, reason
    return None


def _unreadable(root: object) -> str | None:
    pending = [root]
    while pending:
        item = pending.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return "must be a finite number"
        if isinstance(item, str) and any("\ud800" <= char <= "\udfff" for char in item):
            return "the text holds a lone surrogate, which is no character"
        if isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return None
