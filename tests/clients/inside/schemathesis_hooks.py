"""Values that a tiny model can use in place of valid ones of any size, so that most valid requests are answered."""

from __future__ import annotations

from typing import Any

import schemathesis

VOCAB_SIZE = 384
MAX_TOKENS = 24
INT32 = range(2**31)
IDS = ("prompt", "tokens", "stop_token_ids", "allowed_token_ids")


@schemathesis.hook
def map_body(_: Any, body: Any) -> Any:
    """Only what the document allows is replaced: what it forbids must reach the server as it is."""
    if not isinstance(body, dict):
        return body
    usable = dict(body)
    if isinstance(body.get("model"), str):
        usable["model"] = "tiny"
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if type(body.get(name)) is int and MAX_TOKENS < body[name] in INT32:
            usable[name] = 1 + body[name] % MAX_TOKENS
    for name in IDS:
        if name in body:
            usable[name] = inside_vocabulary(body[name])
    return usable


def inside_vocabulary(value: Any) -> Any:
    """Token ids, or lists of them, as the model has them."""
    if isinstance(value, list):
        return [inside_vocabulary(item) for item in value]
    return value % VOCAB_SIZE if type(value) is int and value in INT32 else value
