"""Finding tool calls in the text of an answer, as it comes."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from server.api.held_text import MAX_SPACE, begun_mark, split_space
from server.api.message_piece import CallPiece, MessagePiece
from server.api.tool_call_reader import CallReader


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls; each is a JSON object with a name and arguments."""

    name: str
    opening: str
    """The mark in front of a call."""
    closing: str
    """The mark behind it; may be ""."""
    bare: bool
    """Whether a call may stand without its opening mark, at the start of the text or behind another call."""
    separator: str
    """Between two calls, where the form of the answer is enforced."""
    arguments_key: Literal["arguments", "parameters"]
    opening_is_text: bool = True
    """Whether the opening mark stays when no call follows it; a control token does not."""


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", False, "\n", "arguments")
LLAMA3_JSON = CallFormat("llama3_json", "<|python_tag|>", "", True, "; ", "parameters", opening_is_text=False)
CALL_FORMATS = {form.name: form for form in (HERMES, LLAMA3_JSON)}


class ToolCallParser:
    """Splits text into content and calls; what comes out does not depend on how the text is cut.

    What turns out to be no call is content: a function that was not on offer, another shape, a mark in prose. Arguments
    are the model's own characters, valid or not, once the call has begun: what was streamed cannot be taken back.
    White space between content and a call is dropped.
    """

    def __init__(self, form: CallFormat, names: Collection[str], *, parallel: bool) -> None:
        """`names` are the functions on offer; without `parallel`, calls after the first are dropped."""
        self.calls = 0
        """Calls that have begun."""
        self._form = form
        self._names = names
        self._parallel = parallel
        self._state: Literal["start", "content", "call", "closing", "gap"] = "start" if form.bare else "content"
        self._buffer = ""
        self._reader = CallReader(names)
        self._raw: list[str] = []  # the call's text, until it has begun: perhaps it is content
        self._open = False
        self._piece = MessagePiece()

    def feed(self, text: str) -> MessagePiece:
        """Take the next text."""
        self._buffer += text
        steps = {
            "start": self._at_start,
            "content": self._in_content,
            "call": self._in_call,
            "closing": self._at_closing,
            "gap": self._in_gap,
        }
        while self._buffer and steps[self._state]():
            pass
        return self._take()

    def finish(self, *, cut: bool) -> MessagePiece:
        """The end of the text; `cut` when it was cut by the length limit: a mark that has only begun is dropped."""
        if self._state in ("start", "content"):
            dropped = begun_mark(self._buffer, self._form.opening) if cut else 0
            self._piece.content += self._buffer[: len(self._buffer) - dropped]
        elif self._state == "call" and not self._open and not (cut and not self._form.bare):
            self._piece.content += "".join(self._raw)
        self._buffer = ""
        return self._take()

    def _take(self) -> MessagePiece:
        piece, self._piece = self._piece, MessagePiece()
        return piece

    def _at_start(self) -> bool:
        stripped = self._buffer.lstrip()
        space = len(self._buffer) - len(stripped)
        if not stripped and space <= MAX_SPACE:
            return False
        if stripped.startswith("{") and space <= MAX_SPACE:
            self._begin_call(self._buffer[:space])
            self._buffer = stripped
        else:
            self._state = "content"
        return True

    def _in_content(self) -> bool:
        before, mark, after = self._buffer.partition(self._form.opening)
        if mark:
            text, space = split_space(before)
            self._piece.content += text
            self._begin_call(space + (mark if self._form.opening_is_text else ""))
            self._buffer = after
            return True
        begun = begun_mark(self._buffer, self._form.opening)
        text, space = split_space(self._buffer[: len(self._buffer) - begun])
        self._piece.content += text
        self._buffer = self._buffer[len(text) :]
        return False

    def _begin_call(self, raw: str) -> None:
        self._state = "call"
        self._reader = CallReader(self._names)
        self._raw = [raw]
        self._open = False

    def _in_call(self) -> bool:
        used = self._reader.feed(self._buffer)
        if not self._open:
            self._raw.append(self._buffer[:used])
        self._buffer = self._buffer[used:]
        if self._reader.begun:
            self._add_arguments(self._reader.take_arguments())
        if self._reader.status == "reading":
            return False
        if self._open:
            self._state = "closing" if self._form.closing else "gap"
        else:
            self._piece.content += "".join(self._raw)
            self._state = "content"
        return True

    def _add_arguments(self, arguments: str) -> None:
        is_first, self._open = not self._open, True
        if is_first:
            self.calls += 1
        if self.calls > 1 and not self._parallel:
            return
        if is_first:
            self._piece.calls.append(
                CallPiece(self.calls - 1, f"call_{secrets.token_hex(12)}", self._reader.name, arguments)
            )
        elif arguments:
            self._piece.calls.append(CallPiece(self.calls - 1, None, None, arguments))

    def _at_closing(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._form.closing.startswith(self._buffer) and self._buffer != self._form.closing:
            return False
        self._buffer = self._buffer.removeprefix(self._form.closing)
        self._state = "gap"
        return True

    def _in_gap(self) -> bool:
        self._buffer = self._buffer.lstrip(" \t\r\n;" if self._form.bare else None)
        if not self._buffer:
            return False
        if self._form.bare and self._buffer.startswith("{"):
            self._begin_call("")
        else:
            self._state = "content"
        return True
