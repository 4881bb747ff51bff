"""The one exception whose message is for the user."""

from __future__ import annotations


class UserError(Exception):
    """A start that cannot succeed as asked; the message says what was wrong, the value, and what would work.

    It is printed without a traceback.
    """
