"""Sampling defaults that come with the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from server.errors import UserError


@dataclass(frozen=True)
class GenerationDefaults:
    """What holds where a request says nothing; without a generation_config.json nothing is changed."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GenerationDefaults:
        """Read a generation_config.json; keys that are not fields here (`do_sample` among them) have no effect.

        Raises `UserError` for a value that no request could set.
        """
        chosen = {field.name: config[field.name] for field in fields(cls) if config.get(field.name) is not None}
        for name, value in chosen.items():
            low, high, whole = _BOUNDS[name]
            number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value) and not whole)
            if isinstance(value, bool) or not number or not low <= value <= high:
                raise UserError(
                    f"generation_config.json: {name} is {value!r}, but must be a number from {low} to {high}. "
                    "Correct it, or start with --generation-config none."
                )
        if chosen.get("top_k") == -1:
            chosen["top_k"] = 0
        return cls(**chosen)


_BOUNDS: Mapping[str, tuple[float, float, bool]] = {
    "temperature": (0, 2, False),
    "top_k": (-1, 2**31 - 1, True),
    "top_p": (1e-6, 1, False),
    "min_p": (0, 1, False),
    "repetition_penalty": (1e-6, 10, False),
    "max_new_tokens": (1, 2**31 - 1, True),
}
