"""Values that settings of the target and of the draft share, and their other spellings."""

from __future__ import annotations

from collections.abc import Callable

ATTENTION_NAMES = ("torch", "triton")
MOE_NAMES = ("torch", "grouped_mm", "torch_int4", "triton", "triton_w4a16")
"""Names that the engine's registries hold, repeated here because the registries import torch (a test compares them)."""

_BACKEND_ALIASES = {"torch_sdpa": "torch", "triton_attn": "triton"}
_DTYPE_ALIASES = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}


def backend_name(allowed: tuple[str, ...]) -> Callable[[str | None], str | None]:
    """A check that returns a backend's plain name; None stays unset.

    The check raises ValueError for a name that is neither "auto" nor allowed.
    """

    def check(name: str | None) -> str | None:
        if name is None:
            return None
        plain = _BACKEND_ALIASES.get(name.lower(), name.lower())
        if plain != "auto" and plain not in allowed:
            raise ValueError(f"must be auto or one of {', '.join(allowed)}")
        return plain

    return check


def dtype_name(name: object) -> object:
    """A dtype's plain name; anything else than text as it is."""
    return _DTYPE_ALIASES.get(name.lower(), name.lower()) if isinstance(name, str) else name
