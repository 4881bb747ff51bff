"""Fields that other servers know and this one refuses, because ignoring them would change the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.api.errors import invalid

NO_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prediction",
        "parallel_tool_calls",
        "include_reasoning",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""Known fields that never change the text; accepted in silence."""

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "truncation_side": ("left",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "kv_transfer_params": (),
    "mm_processor_kwargs": (),
    "multi_modal_data": (),
    "prompt_embeds": (),
}
"""Field names with the values that mean the same as leaving the field out."""

_MESSAGE_FIELDS = ("function_call", "audio")


def refuse_unsupported(raw: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise `ApiError` 400 for the first field that is neither in `known` nor without effect."""
    for name in raw:
        harmless = _HARMLESS.get(name)
        if harmless is not None and name not in known and not any(_same(raw[name], value) for value in harmless):
            raise _not_supported(name)
    messages = raw.get("messages")
    if isinstance(messages, list):
        for i, message in enumerate(messages):
            if isinstance(message, dict):
                for name in _MESSAGE_FIELDS:
                    if message.get(name) not in (None, []):
                        raise _not_supported(f"messages[{i}].{name}")


def is_unknown(name: str) -> bool:
    """Whether nobody has heard of the field: it is ignored, and the answer says so."""
    return name not in _HARMLESS and name not in NO_EFFECT


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _not_supported(name: str) -> Exception:
    return invalid(f"{name}: this server does not support it; leave it out.", param=name, code="unsupported_parameter")
