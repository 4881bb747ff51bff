"""Values of settings: those that target and draft share, other spellings, and checks of single values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from urllib.parse import urlsplit

ATTENTION_NAMES = ("torch", "triton", "flashinfer")
MOE_NAMES = ("torch", "grouped_mm", "torch_int4", "triton", "triton_w4a16", "flashinfer_cutlass")
"""Names that the engine's registries hold, repeated here because the registries import torch (a test compares them)."""

_BACKEND_ALIASES = {"torch_sdpa": "torch", "triton_attn": "triton"}
_DTYPE_ALIASES = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}

_FP8_ALIASES = {"fp8_e4m3": "fp8", "float8_e4m3fn": "fp8"}


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


def kv_dtype_name(name: object) -> object:
    """The same for a KV cache's."""
    plain = dtype_name(name)
    return _FP8_ALIASES.get(plain, plain) if isinstance(plain, str) else plain


def lower(name: object) -> object:
    """Names in lower case; anything else as it is."""
    return name.lower() if isinstance(name, str) else name


def several(value: object) -> object:
    """The values in a variable: a JSON list, or separated by commas.

    Raises ValueError for text that begins like a JSON list and is none.
    """
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError("must be a JSON list, or values separated by commas") from error
    return [item.strip() for item in value.split(",")]


def multiple_of_16(size: int | None) -> int | None:
    """The size itself; raises ValueError for another."""
    if size is not None and size % 16:
        raise ValueError(
            f"must be a multiple of 16 (the nearest are {size // 16 * 16 or 16} and {size // 16 * 16 + 16})"
        )
    return size


def http_url(url: str | None) -> str | None:
    """A URL that something can be sent to.

    Raises:
        ValueError: it is none.
    """
    if url is not None and not (url.startswith(("http://", "https://")) and urlsplit(url).hostname):
        raise ValueError("must be an http:// or https:// URL, such as http://localhost:4318")
    return url


def origin(value: str) -> str:
    """A web origin, or "*" for all; raises ValueError for anything else."""
    if value != "*" and not re.fullmatch(r"https?://[^/\s?#*]+", value):
        raise ValueError("must be scheme and host, with a port where it has one, such as https://chat.example, or *")
    return value


def path_prefix(path: str) -> str:
    """A path to put before others, or nothing; raises ValueError for anything else."""
    if path and (not path.startswith("/") or path.endswith("/")):
        raise ValueError("must begin with / and not end with it, such as /llm")
    return path


def one_rank(size: int) -> int:
    """1; raises ValueError for another number."""
    if size != 1:
        raise ValueError("must be 1: this version runs a model on one device only")
    return size
