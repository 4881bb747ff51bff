"""A grammar as llguidance reads it, and the limits within which it is compiled and followed."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

from server.messages import Grammar


def source_text(grammar: Grammar) -> str:
    """What `LLMatcher` takes. Raises `ValueError` for a schema that is no JSON object."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def parser_limits() -> LLParserLimits:
    """Bounds on the work and memory of one grammar: a mask takes some 10 ms at most, a lexer some 40 MB."""
    return LLParserLimits(
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_items_in_row=2_000,
        max_lexer_states=20_000,
        precompute_large_lexemes=False,  # its work grows with the vocabulary, beyond what the first compilation sees
        verbose_errors=False,
    )
