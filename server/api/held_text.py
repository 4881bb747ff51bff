"""How much of a text has to wait, because a mark may begin in it."""

from __future__ import annotations

MAX_SPACE = 256
"""White space next to a mark that is dropped with it, in characters; what is beyond is text."""


def begun_mark(text: str, mark: str) -> int:
    """Length of the longest end of `text` with which `mark` begins but does not end."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def split_space(text: str) -> tuple[str, str]:
    """The text and the white space at its end that goes with a mark behind it."""
    space = min(len(text) - len(text.rstrip()), MAX_SPACE)
    return (text[:-space], text[-space:]) if space else (text, "")
