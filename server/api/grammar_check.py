"""Whether a grammar can be compiled: found out before the request reaches the engine, off the event loop."""

from __future__ import annotations

import asyncio

from llguidance import LLMatcher

from server.api.errors import invalid
from server.api.structured import AskedGrammar
from server.grammar.source import parser_limits, source_text
from server.messages import Grammar


class GrammarChecker:
    """Compiles what clients ask for, to tell them what is wrong with it."""

    async def check(self, asked: AskedGrammar | None) -> Grammar | None:
        """The grammar itself. Raises `ApiError` 400 that names the field when it cannot be compiled."""
        if asked is None:
            return None
        problem = await asyncio.to_thread(_problem, asked.grammar)
        if problem:
            raise invalid(f"{asked.param}: {problem}", param=asked.param)
        return asked.grammar


def _problem(grammar: Grammar) -> str:
    return LLMatcher.validate_grammar(source_text(grammar), limits=parser_limits())
