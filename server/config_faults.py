"""How a wrong setting is explained to whoever wrote it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from server.errors import UserError

_PLAIN_WORDS = (
    ("String should have at least 1 character", "must not be empty"),
    ("Input should", "must"),
    ("a valid integer", "a whole number"),
    ("a valid number", "a number"),
    ("a valid boolean", "true or false"),
    ("a valid string", "text (put quotes around it)"),
    ("a valid tuple", "a list"),
    ("a valid dictionary or instance of BatchSizeRule", "[lo, hi, k], three whole numbers"),
)


class UsageError(UserError):
    """The command line, a variable or the file says something that is no setting (exit code 2)."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that names the nearest right name, or nothing when none is near."""
    close = nearest_name(name, known)
    return f"; did you mean {close}?" if close else ""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The nearest right name, if any is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def plain_words(message: str) -> str:
    """A message of pydantic's without its terms."""
    message = message.removeprefix("Value error, ").split(", unable to parse")[0]
    for pydantic_words, ours in _PLAIN_WORDS:
        message = message.replace(pydantic_words, ours)
    return message
