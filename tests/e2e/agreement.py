"""When two answers to one question are the same."""

from __future__ import annotations

import math
from typing import Any


def agree(one: Any, other: Any) -> bool:
    """Equal, but for log-probabilities: those of two batches differ by their rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-3)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(agree(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(agree, one, other))
    return bool(one == other)
