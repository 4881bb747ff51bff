"""Reading one tool call, a JSON object, character by character as the model writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any, Literal

_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_SPACE = " \t\n\r"
_MAX_SHORT = 512
"""Characters of a key, a name, a type or an id."""
_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_QUOTES = re.compile(r'["\\]')


class CallReader:
    """Reads `{"name": …, "arguments": {…}}`, its keys in any order; `parameters` is the same as `arguments`.

    The arguments are handed on as they are written, and while they are written: they are an object, a string that holds
    one, or missing. The call has begun, and can no longer be plain text, when its name is that of a function on offer
    and its arguments are an object.
    """

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the functions on offer."""
        self.name: str | None = None
        self.status: Literal["reading", "done", "broken"] = "reading"
        self._names = names
        self._state: Callable[[str], None] = self._before_object
        self._after_string: Callable[[], None] = self._end_of_key
        self._seen: set[str] = set()
        self._key = ""
        self._string: list[str] = []
        self._escaped = False
        self._in_quotes = False
        self._depth = 0  # of brackets in the arguments; above 0 while they are read
        self._has_arguments = False
        self._arguments: list[str] = []

    @property
    def begun(self) -> bool:
        """Whether this is a call for certain."""
        return self.name is not None and self._has_arguments

    def feed(self, text: str) -> int:
        """Read on; returns how many characters belong to the call. The one that breaks it does not."""
        position = 0
        while position < len(text) and not self._is_over():
            if self._depth:
                position = self._scan_arguments(text, position)
            else:
                self._state(text[position])
                if self.status == "broken":
                    break
                position += 1
        return position

    def take_arguments(self) -> str:
        """The arguments since the last time; nothing before the call has begun."""
        if not self.begun:
            return ""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def _is_over(self) -> bool:
        return self.status != "reading"

    def _break(self) -> None:
        self.status = "broken"

    def _before_object(self, char: str) -> None:
        if char == "{":
            self._state = self._before_key
        elif char not in _SPACE:
            self._break()

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._begin_string(self._end_of_key)
        elif char == "}" and self._seen:
            self._finish()
        elif char not in _SPACE:
            self._break()

    def _end_of_key(self) -> None:
        key = self._decoded()
        twice = key in self._seen or (key in _ARGUMENTS and not self._seen.isdisjoint(_ARGUMENTS))
        if not isinstance(key, str) or key not in _KEYS or twice:
            return self._break()
        self._seen.add(key)
        self._key = key
        self._state = self._before_colon

    def _before_colon(self, char: str) -> None:
        if char == ":":
            self._state = self._before_value
        elif char not in _SPACE:
            self._break()

    def _before_value(self, char: str) -> None:
        if char == '"':
            self._begin_string(self._end_of_value)
        elif char == "{" and self._key in _ARGUMENTS:
            self._has_arguments = True
            self._arguments.append(char)
            self._depth = 1
        elif char == "n" and self._key != "name":
            self._string = [char]
            self._state = self._in_null
        elif char not in _SPACE:
            self._break()

    def _in_null(self, char: str) -> None:
        self._string.append(char)
        word = "".join(self._string)
        if word == "null":
            self._state = self._after_value
        elif not "null".startswith(word):
            self._break()

    def _scan_arguments(self, text: str, start: int) -> int:
        """Take a run of the arguments, up to the next character that matters; returns where it ends."""
        if self._escaped:
            self._escaped = False
            self._arguments.append(text[start])
            return start + 1
        match = (_IN_QUOTES if self._in_quotes else _STRUCTURE).search(text, start)
        end = len(text) if match is None else match.end()
        char = "" if match is None else match[0]
        if char == "<":  # no JSON any more; in every format that we read a mark begins with it
            end -= 1
            self._break()
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_quotes = not self._in_quotes
        elif char and char in "{[":
            self._depth += 1
        elif char:
            self._depth -= 1
            self._state = self._after_value
        self._arguments.append(text[start:end])
        return end

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._state = self._before_key
        elif char == "}":
            self._finish()
        elif char not in _SPACE:
            self._break()

    def _begin_string(self, after: Callable[[], None]) -> None:
        self._string = ['"']
        self._escaped = False
        self._after_string = after
        self._state = self._in_string

    def _in_string(self, char: str) -> None:
        self._string.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._after_string()
        elif len(self._string) > _MAX_SHORT and self._key not in _ARGUMENTS:
            self._break()

    def _end_of_value(self) -> None:
        value = self._decoded()
        if self._key == "name":
            if not isinstance(value, str) or value not in self._names:
                return self._break()
            self.name = value
        elif self._key in _ARGUMENTS:
            if not isinstance(value, str) or not isinstance(_json(value), dict) or not _is_text(value):
                return self._break()
            self._has_arguments = True
            self._arguments.append(value)
        self._state = self._after_value

    def _decoded(self) -> Any:
        return _json("".join(self._string))

    def _finish(self) -> None:
        if self.name is None:
            return self._break()
        if not self._has_arguments:
            self._has_arguments = True
            self._arguments.append("{}")
        self.status = "done"


def _json(text: str) -> Any:
    """The value, or None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_text(value: str) -> bool:
    """Whether it holds no lone surrogate, which JSON can spell and no answer can carry."""
    return not any("\ud800" <= char <= "\udfff" for char in value)
