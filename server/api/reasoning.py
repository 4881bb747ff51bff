"""Splitting what the model thinks, between marks, from what it answers."""

from __future__ import annotations

from typing import Literal

from server.api.held_text import MAX_SPACE, begun_mark, split_space
from server.api.message_piece import MessagePiece

OPENING = "<think>"
CLOSING = "</think>"


def is_open(text: str) -> bool:
    """Whether a message so far ends inside the reasoning."""
    return text.rfind(OPENING) > text.rfind(CLOSING)


class ThinkSplitter:
    """Takes `<think>…</think>` at the start of the text out of it; the content is what is left.

    White space around the marks is dropped. What comes out does not depend on how the text is cut.
    """

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt ends inside the reasoning, because the chat template writes the opening mark."""
        self._state: Literal["start", "opened", "thinking", "thought", "content"] = "opened" if opened else "start"
        self._buffer = ""
        self._piece = MessagePiece()

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._state in ("opened", "thinking")

    def feed(self, text: str) -> MessagePiece:
        """Take the next text."""
        self._buffer += text
        steps = {
            "start": self._at_start,
            "opened": self._at_opening,
            "thinking": self._in_thought,
            "thought": self._behind_thought,
            "content": self._in_content,
        }
        while self._buffer and steps[self._state]():
            pass
        return self._take()

    def finish(self, *, cut: bool) -> MessagePiece:
        """The end of the text; `cut` when it was cut by the length limit: a mark that has only begun is dropped."""
        if self.thinking:
            dropped = begun_mark(self._buffer, CLOSING) if cut else 0
            self._piece.reasoning += self._buffer[: len(self._buffer) - dropped].rstrip()
        elif self._state == "start" and not (cut and self._buffer.strip()):
            self._piece.content += self._buffer
        self._buffer = ""
        return self._take()

    def _take(self) -> MessagePiece:
        piece, self._piece = self._piece, MessagePiece()
        return piece

    def _at_start(self) -> bool:
        stripped = self._buffer.lstrip()
        if len(self._buffer) - len(stripped) > MAX_SPACE:
            self._state = "content"
        elif stripped.startswith(OPENING):
            self._buffer = stripped.removeprefix(OPENING)
            self._state = "opened"
        elif OPENING.startswith(stripped):
            return False
        else:
            self._state = "content"
        return True

    def _at_opening(self) -> bool:
        """Some models write the mark that the template has written already."""
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(OPENING):
            self._buffer = self._buffer.removeprefix(OPENING)
        elif OPENING.startswith(self._buffer):
            return False
        else:
            self._state = "thinking"
        return True

    def _in_thought(self) -> bool:
        before, mark, after = self._buffer.partition(CLOSING)
        if mark:
            self._piece.reasoning += split_space(before)[0]
            self._buffer = after
            self._state = "thought"
            return True
        begun = begun_mark(self._buffer, CLOSING)
        text, _ = split_space(self._buffer[: len(self._buffer) - begun])
        self._piece.reasoning += text
        self._buffer = self._buffer[len(text) :]
        return False

    def _behind_thought(self) -> bool:
        self._buffer = self._buffer.lstrip()
        self._state = "content" if self._buffer else "thought"
        return True

    def _in_content(self) -> bool:
        self._piece.content += self._buffer
        self._buffer = ""
        return False
