"""From a conversation to the prompt's text: which of a model's templates, with which variables."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.api.chat_messages import DEFAULT_TASTE, TASTES, Taste, probe_messages, suits, template_messages
from server.api.errors import ApiError, invalid
from server.api.template_renderer import TemplateFailedError, TemplateRefusedError, TemplateRenderer

_log = logging.getLogger(__name__)

_CONTINUE_HERE = "<[continue-final-message]> "
"""Stands behind the last message while it is rendered: the prompt ends where the mark begins. Its space shows whether
the template takes white space off the ends of messages."""


@dataclass(frozen=True)
class Conversation:
    """What a template renders."""

    messages: Sequence[Mapping[str, Any]]
    """As the client wrote them, checked; contents are strings or missing, arguments of tool calls strings."""
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The client's own variables; none of them has a name that is used here."""


class ChatTemplates:
    """The templates of one model. Safe to use from several threads; the methods may block."""

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], renderer: TemplateRenderer
    ) -> None:
        """`templates` by name ("default", "tool_use"); the special tokens become variables."""
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._renderer = renderer
        self._tastes: dict[str, Taste] = {}

    def render(self, conversation: Conversation) -> str:
        """The prompt text, BOS included where the template writes it.

        Text of messages is tokenised together with the template's control tokens, as every other server does: a message
        that spells a control token is that token. Raises `ApiError` 400.
        """
        source = self._choose(with_tools=bool(conversation.tools))
        has_calls = any(message.get("tool_calls") for message in conversation.messages)
        taste = self._taste(source) if has_calls else DEFAULT_TASTE
        messages = template_messages(conversation.messages, taste, knows_developer="developer" in source)
        if conversation.continue_final_message:
            messages[-1]["content"] += _CONTINUE_HERE
        try:
            text = self._render(source, conversation, messages)
        except TemplateRefusedError as refusal:
            raise invalid(f"The model's chat template refuses these messages: {refusal}", param="messages") from None
        except TemplateFailedError as failure:
            _log.info("the chat template failed: %s", failure)
            raise invalid("The model's chat template cannot render these messages.", param="messages") from None
        return _before_mark(text) if conversation.continue_final_message else text

    def mentions(self, word: str, *, with_tools: bool) -> bool:
        """Whether the template in use holds `word`, such as the name of a variable."""
        return word in self._choose(with_tools=with_tools)

    def _choose(self, *, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._sources:
            return self._sources["tool_use"]
        if "default" in self._sources:
            return self._sources["default"]
        if len(self._sources) == 1:
            return next(iter(self._sources.values()))
        raise ApiError(
            400,
            "This model has no chat template: use /v1/completions.",
            param="messages",
            code="no_chat_template",
            rejection="invalid",
        )

    def _taste(self, source: str) -> Taste:
        """How the template likes tool calls: found out by rendering one."""
        taste = self._tastes.get(source)
        if taste is None:
            taste = self._tastes[source] = next(filter(lambda taste: self._likes(source, taste), TASTES), DEFAULT_TASTE)
        return taste

    def _likes(self, source: str, taste: Taste) -> bool:
        messages = probe_messages()
        try:
            text = self._render(
                source,
                Conversation(messages, add_generation_prompt=False),
                template_messages(messages, taste, knows_developer=True),
            )
        except (TemplateRefusedError, TemplateFailedError):
            return False
        return suits(text)

    def _render(self, source: str, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        variables = {
            **conversation.arguments,
            **self._special_tokens,
            "messages": messages,
            "tools": list(conversation.tools) or None,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        return self._renderer.render(source, variables)


def _before_mark(text: str) -> str:
    before, mark, after = text.rpartition(_CONTINUE_HERE.rstrip())
    if not mark:
        raise invalid(
            "continue_final_message: the model's chat template does not show the last message as it is.",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()
