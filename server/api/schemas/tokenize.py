"""The fields of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from server.api.schemas.chat import ChatMessage, TemplateArguments, Tools
from server.api.schemas.fields import STRICT, TokenIds


class TokenizeFields(BaseModel):
    """A text or a conversation; exactly one of them."""

    model_config = STRICT

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=65536, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """Unset: true for a text, false for a conversation, as when generating."""
    add_generation_prompt: bool | None = None
    """Unset: true, unless the final message is continued."""
    continue_final_message: bool = False
    chat_template_kwargs: TemplateArguments = {}
    tools: Tools = []
    return_token_strs: bool = False


class DetokenizeFields(BaseModel):
    """Token ids to turn into text, special tokens included."""

    model_config = STRICT

    model: str | None = None
    tokens: TokenIds
