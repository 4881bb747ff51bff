"""From a JSON object to checked fields, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from server.api.errors import ApiError, invalid
from server.api.schemas.unsupported import is_unknown

Model = TypeVar("Model", bound=BaseModel)

_SAFE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_NAMED = 32


def without_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`null` means absent."""
    return {name: value for name, value in raw.items() if value is not None}


def validate(model: type[Model], raw: Mapping[str, Any]) -> Model:
    """Check the fields of `model` and leave the others alone. Raises `ApiError` 400 for the first one that is wrong."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from None


def ignored_fields(raw: Mapping[str, Any], models: Iterable[type[BaseModel]]) -> list[str]:
    """Names of unknown fields, those that may stand in a header, 32 at most."""
    known = {name for model in models for name in model.model_fields}
    unknown = (name for name in raw if name not in known and is_unknown(name) and _SAFE_NAME.fullmatch(name))
    return sorted(unknown)[:_MAX_NAMED]


def _explain(error: ErrorDetails) -> ApiError:
    param = _path(error["loc"])
    kind = error["type"]
    if kind == "missing":
        return invalid(f"{param} is missing.", param=param, code="missing_required_parameter")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        reason = "must be an object"
    else:
        reason = error["msg"].removeprefix("Input ")
    return invalid(f"{param}: {reason}{_got(error['input'], kind)}.", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path


def _got(value: object, kind: str) -> str:
    if kind == "refused" or not isinstance(value, str | int | float):
        return ""
    if isinstance(value, bool):
        return f", got {str(value).lower()}"
    if isinstance(value, int) and value.bit_length() > 128:
        return ", got a far larger number"
    text = repr(value)
    return f", got {text if len(text) <= 60 else text[:60] + '…'}"
