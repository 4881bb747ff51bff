"""POST /tokenize, POST /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from server.api.body import read_request
from server.api.conversation import conversation_of
from server.api.errors import invalid
from server.api.long_texts import Ids
from server.api.schemas.load import simple_loader
from server.api.schemas.tokenize import DetokenizeFields, TokenizeFields
from server.api.service import json_response
from server.api.service_bodies import DetokenizeBody, TokenizeBody
from server.api.serving import Serving
from server.api.tokenising import TextCodec

INFO_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["tokenizer_class", "eos_token_ids", "chat_template", "vocab_size"],
    "properties": {
        "tokenizer_class": {"type": "string"},
        "eos_token_ids": {"type": "array", "items": {"type": "integer"}},
        "chat_template": {"type": ["string", "null"]},
        "vocab_size": {"type": "integer"},
    },
    "additionalProperties": {"type": "string", "description": "A special token, such as eos_token."},
}

_AT_ONCE = 65536

_load_tokenize = simple_loader(TokenizeFields)
_load_detokenize = simple_loader(DetokenizeFields)


async def tokenize(request: Request, serving: Serving) -> Response:
    """Token ids of a text or of a rendered conversation. Raises `ApiError`."""
    codec = serving.codec
    asked = await read_request(request, _load_tokenize)
    fields = asked.fields
    serving.check_model_name(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("Give either prompt or messages.", param="prompt")
    max_model_len = serving.max_model_len

    def answer() -> Response:
        ids = _encode(codec, fields)
        strings = [codec.token_bytes.label(token_id) for token_id in ids] if fields.return_token_strs else UNSET
        tokens = ids if isinstance(ids, list) else cast("list[int]", _written(ids))
        return json_response(TokenizeBody(len(ids), max_model_len, tokens, strings), asked.headers)

    return await serving.work(request, answer)


async def detokenize(request: Request, serving: Serving) -> Response:
    """Text of token ids, special tokens included. Raises `ApiError`."""
    codec = serving.codec
    asked = await read_request(request, _load_detokenize)
    fields = asked.fields
    serving.check_model_name(fields.model)

    def answer() -> Response:
        tokens = codec.check_ids(fields.tokens, "tokens")
        return json_response(DetokenizeBody(codec.token_bytes.decode(tokens, skip_special_tokens=False)), asked.headers)

    return await serving.work(request, answer)


async def tokenizer_info(serving: Serving) -> Response:
    """Special tokens and chat templates. Raises `ApiError` 503."""
    files = serving.model.tokenizer
    return json_response(
        {
            "tokenizer_class": files.kind,
            **files.special_tokens,
            "eos_token_ids": list(files.eos_token_ids),
            "chat_template": files.chat_templates.get("default"),
            "vocab_size": serving.engine_ready.vocab_size,
        }
    )


def _written(ids: Ids) -> msgspec.Raw:
    """Millions of ids as JSON, made in pieces between which others get their answers."""
    pieces = (msgspec.json.encode(ids[at : at + _AT_ONCE].tolist())[1:-1] for at in range(0, len(ids), _AT_ONCE))
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


def _encode(codec: TextCodec, fields: TokenizeFields) -> list[int] | Ids:
    if fields.messages is not None:
        conversation = conversation_of(
            fields.messages,
            fields.tools,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            arguments=fields.chat_template_kwargs,
        )
        return codec.encode_chat(conversation, add_special_tokens=bool(fields.add_special_tokens)).token_ids
    return codec.encode_text(fields.prompt or "", add_special_tokens=fields.add_special_tokens is not False)
