"""From the text of a choice to the parts of a message: reasoning, content, tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from server.api.message_piece import MessagePiece
from server.api.reasoning import CLOSING, OPENING, ThinkSplitter
from server.api.tool_call_parser import CallFormat, ToolCallParser
from server.messages import FinishReason


@dataclass(frozen=True)
class ReadingRules:
    """What to look for in the text of a request's choices."""

    call_format: CallFormat | None = None
    """None: no tools are on offer, or they may not be called; the text is not searched for calls."""
    function_names: frozenset[str] = frozenset()
    parallel_calls: bool = True
    split_reasoning: bool = False
    reasoning_opened: bool = False
    """Whether the prompt ends inside the reasoning."""
    include_reasoning: bool = True
    """False: what the model thinks is left out of the answer."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What is looked for; in some vocabularies these are special tokens."""
        of_calls = () if self.call_format is None else (self.call_format.opening, self.call_format.closing)
        return (*of_calls, *((OPENING, CLOSING) if self.split_reasoning else ()))


class MessageReader:
    """Reads the text of one choice; streamed and whole answers are made of the same pieces."""

    def __init__(self, rules: ReadingRules) -> None:
        self._rules = rules
        self._splitter = ThinkSplitter(opened=rules.reasoning_opened) if rules.split_reasoning else None
        self._parser: ToolCallParser | None = None
        if rules.call_format is not None:
            self._parser = ToolCallParser(rules.call_format, rules.function_names, parallel=rules.parallel_calls)

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun."""
        return self._parser is not None and self._parser.calls > 0

    def feed(self, text: str, finish_reason: FinishReason | None) -> MessagePiece:
        """Take the next text; `finish_reason` with the last of it, which may be empty."""
        piece = MessagePiece(content=text)
        if self._splitter is not None:
            piece = self._splitter.feed(text)
            if finish_reason is not None:
                end = self._splitter.finish(cut=finish_reason == "length")
                piece.reasoning += end.reasoning
                piece.content += end.content
            if not self._rules.include_reasoning:
                piece.reasoning = ""
        if self._parser is not None:
            read = self._parser.feed(piece.content)
            piece.content, piece.calls = read.content, read.calls
            if finish_reason is not None:
                piece.content += self._parser.finish(cut=finish_reason == "length").content
        return piece
