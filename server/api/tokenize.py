"""POST /tokenize, POST /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.body import read_request
from server.api.errors import invalid
from server.api.schemas.load import simple_loader
from server.api.schemas.tokenize import DetokenizeFields, TokenizeFields
from server.api.serving import Serving
from server.api.tokenising import ChatPrompt, TextCodec

_load_tokenize = simple_loader(TokenizeFields)
_load_detokenize = simple_loader(DetokenizeFields)


async def tokenize(request: Request, serving: Serving) -> Response:
    """Token ids of a text or of a rendered conversation. Raises `ApiError`."""
    codec = serving.codec
    fields = await read_request(request, _load_tokenize)
    serving.check_model_name(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("Give either prompt or messages.", param="prompt")
    ids = await serving.work(request, lambda: _encode(codec, fields))
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": serving.max_model_len, "tokens": ids}
    if fields.return_token_strs:
        answer["token_strs"] = [codec.token_bytes.label(token_id) for token_id in ids]
    return _json(answer)


async def detokenize(request: Request, serving: Serving) -> Response:
    """Text of token ids, special tokens included. Raises `ApiError`."""
    codec = serving.codec
    fields = await read_request(request, _load_detokenize)
    serving.check_model_name(fields.model)
    tokens = codec.check_ids(fields.tokens, "tokens")
    text = await serving.work(request, lambda: codec.token_bytes.decode(tokens, skip_special_tokens=False))
    return _json({"prompt": text})


async def tokenizer_info(serving: Serving) -> Response:
    """Special tokens and chat templates. Raises `ApiError` 503."""
    files = serving.model.tokenizer
    return _json(
        {
            "tokenizer_class": files.kind,
            **files.special_tokens,
            "eos_token_ids": list(files.eos_token_ids),
            "chat_template": files.chat_templates.get("default"),
            "vocab_size": serving.model.vocab_size,
        }
    )


def _encode(codec: TextCodec, fields: TokenizeFields) -> list[int]:
    if fields.messages is not None:
        chat = ChatPrompt(
            messages=[message.model_dump(exclude_none=True) for message in fields.messages],
            add_generation_prompt=fields.add_generation_prompt,
            add_special_tokens=bool(fields.add_special_tokens),
            arguments=fields.chat_template_kwargs,
        )
        return codec.encode_chat(chat).token_ids
    return codec.encode_text(fields.prompt or "", add_special_tokens=fields.add_special_tokens is not False)


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
