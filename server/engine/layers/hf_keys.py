"""Checked reading of a Hugging Face config: absent keys fall back to the family's defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from server.errors import UserError


class Keys:
    """Typed access to a mapping that a stranger wrote."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = {**defaults, **config}
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def bad(self, name: str, expected: str) -> UserError:
        """The error for a value that is not what it should be."""
        if name not in self.values:
            return UserError(f"{self.where}: {name} is missing; it must be {expected}")
        return UserError(f"{self.where}: {name} is {self.values[name]!r}; it must be {expected}")

    def integer(self, name: str, minimum: int = 1) -> int:
        """A whole number of at least `minimum`.

        Raises:
            UserError: absent without a default, or anything else.
        """
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.bad(name, f"a whole number of at least {minimum}")
        return value

    def number(self, name: str) -> float:
        """A finite positive number.

        Raises:
            UserError: absent without a default, or anything else.
        """
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.bad(name, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; absent and null are false.

        Raises:
            UserError: anything else.
        """
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return bool(value)
