"""Rendering the model's chat template: foreign code from a checkpoint, so it runs in a sandbox."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.api.errors import ApiError, invalid

_log = logging.getLogger(__name__)


class _RefusedByTemplateError(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; for rendering it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplates:
    """The templates of one model, compiled at their first use. Safe to use from several threads."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`templates` by name ("default", "tool_use"); the special tokens become variables."""
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, str | int | float | bool],
    ) -> str:
        """The prompt text, BOS included where the template writes it.

        Text of messages is tokenised together with the template's control tokens, as every other server does: a message
        that spells a control token is that token. Raises `ApiError` 400.
        """
        name = self._choose()
        try:
            return self._template(name).render(
                {
                    **self._special_tokens,
                    **arguments,
                    "messages": messages,
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _RefusedByTemplateError as error:
            raise invalid(
                f"The model's chat template refuses these messages: {error.message}", param="messages"
            ) from None
        except Exception:
            # A template is a program that we did not write: it can fail in any way, and only its input is the client's.
            _log.info("the chat template failed", exc_info=True)
            raise invalid("The model's chat template cannot render these messages.", param="messages") from None

    def _choose(self) -> str:
        if "default" in self._sources:
            return "default"
        if len(self._sources) == 1:
            return next(iter(self._sources))
        raise ApiError(
            400,
            "This model has no chat template: use /v1/completions.",
            param="messages",
            code="no_chat_template",
            rejection="invalid",
        )

    def mentions(self, word: str) -> bool:
        """Whether the template in use holds `word`, such as the name of a role."""
        return word in self._sources[self._choose()]

    def _template(self, name: str) -> jinja2.Template:
        template = self._compiled.get(name)
        if template is None:
            template = self._compiled[name] = self._environment.from_string(self._sources[name])
        return template


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedByTemplateError(str(message)[:1000])


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
