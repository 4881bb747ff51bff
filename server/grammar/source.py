"""A grammar as llguidance reads it, and the limits within which it is compiled and followed."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

from server.messages import Grammar


def source_text(grammar: Grammar) -> str:
    """What `LLMatcher` takes."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def parser_limits() -> LLParserLimits:
    """Bounds on the work and memory that one grammar may take."""
    return LLParserLimits(verbose_errors=False)
