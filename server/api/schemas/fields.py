"""Field types with the bounds that several schemas share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

STRICT = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
"""Numbers are numbers: no "2", no true for 1, nothing infinite."""

MAX_STOPS = 16
_MAX_STOP_LENGTH = 4096
_MAX_COUNT = 2**31 - 1


def refuse(message: str) -> PydanticCustomError:
    """An error whose text stands in the answer as it is."""
    # The text is a template to pydantic: without context, braces stay as they are.
    return PydanticCustomError("refused", "{message}", {"message": message})


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise refuse("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise refuse(f"may hold at most {MAX_STOPS} strings")
    for stop in stops:
        if not stop:
            raise refuse("an empty string would end every text at once")
        if len(stop) > _MAX_STOP_LENGTH:
            raise refuse(f"a stop string may have at most {_MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise refuse("must be an object of token ids and numbers")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10):
            raise refuse(f"{str(key)[:40]!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise refuse(f"the bias of token {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def _bad_words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        raise refuse("must be a list of strings that are not empty")
    if len(value) > 1024 or sum(map(len, value)) > 65536:
        raise refuse("may hold at most 1024 words of 65536 characters together")
    return tuple(value)


def _top_k(value: object) -> object:
    return 0 if value == -1 and not isinstance(value, bool) else value


Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
Positive = Annotated[int, Field(ge=1, le=_MAX_COUNT)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=_MAX_COUNT)]], Field(fail_fast=True)]
TopK = Annotated[
    int,
    BeforeValidator(_top_k),
    Field(ge=0, le=_MAX_COUNT),
    WithJsonSchema({"type": "integer", "minimum": -1, "maximum": _MAX_COUNT}),
]
_STOP = {"type": "string", "minLength": 1, "maxLength": _MAX_STOP_LENGTH}
Stops = Annotated[
    tuple[str, ...],
    PlainValidator(_stops),
    WithJsonSchema(
        {
            "anyOf": [
                _STOP,
                {"type": "array", "items": _STOP, "maxItems": MAX_STOPS},
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
BadWords = Annotated[
    tuple[str, ...],
    PlainValidator(_bad_words),
    WithJsonSchema({"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 1024}),
]
