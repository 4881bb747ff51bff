"""From the draft's settings as given to the checked ones, with faults in the user's words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from server.config_faults import UsageError, plain_words
from server.config_speculative import FLAG, Given
from server.spec.settings import METHODS, SpeculativeSettings

_NUMBER_FAULTS = frozenset(
    {
        "int_type",
        "int_parsing",
        "int_parsing_size",
        "int_from_float",
        "float_type",
        "float_parsing",
        "finite_number",
        "greater_than_equal",
        "less_than_equal",
    }
)
_TRUTH_KEY = "adaptive_k"


def draft_settings(merged: Mapping[str, Given]) -> SpeculativeSettings:
    """Judge what all sources say together.

    Raises:
        UsageError: every impossible value, with where it was given, or the first rule that several of them break.
    """
    values = {name: _value(name, given) for name, given in merged.items() if given.value is not None}
    try:
        return SpeculativeSettings.model_validate(values)
    except ValidationError as error:
        raise UsageError("\n".join(_explain(detail, merged) for detail in error.errors())) from None


def _value(name: str, given: Given) -> Any:
    """What a variable or a flag says as text becomes a list where one is wanted; the rest pydantic reads."""
    value = given.value
    if _is_list(name) and isinstance(value, str):
        value = _list(value, given.place)
    if name != _TRUTH_KEY and _holds_truth(value):
        raise UsageError(f"draft setting {given.place}: {_wanted(name)}, not true or false")
    return value


def _list(text: str, place: str) -> list[Any]:
    """A JSON list, or plain entries between commas."""
    if not text.lstrip().startswith("["):
        return [entry.strip() for entry in text.split(",")]
    try:
        entries: list[Any] = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"draft setting {place}: is not a JSON list ({error})") from None
    return entries


def _holds_truth(value: object) -> bool:
    """Whether it is or holds a boolean, which would pass for a number."""
    if isinstance(value, list):
        return any(map(_holds_truth, value))
    return any(map(_holds_truth, value.values())) if isinstance(value, dict) else isinstance(value, bool)


def _explain(detail: ErrorDetails, merged: Mapping[str, Given]) -> str:
    message = plain_words(detail["msg"])
    path = detail["loc"]
    if not path:
        # A rule about several keys: its text begins with the key that breaks it.
        name = message.split()[0].rstrip(":")
        if name not in merged:
            return f"{FLAG}: {message}"
        return f"draft setting {merged[name].place}: {message.removeprefix(name + ':').lstrip()}"
    name = str(path[0])
    if len(path) == 1 and detail["type"] in _NUMBER_FAULTS:
        message = _wanted(name)
    if name == "method":
        message = f"must be {', '.join(map(repr, METHODS))}, or 'none' for no speculation"
    entry = "".join(f" [{step}]" for step in path[1:])
    return f"draft setting {merged[name].place}:{entry} {message}"


def _wanted(name: str) -> str:
    """What a key must be, with both ends of its range."""
    info = SpeculativeSettings.model_fields[name]
    if _is_list(name):
        return "must be a list"
    kind = {int: "a whole number", float: "a number"}.get(get_args(info.annotation)[0], "text")
    low = next((bound.ge for bound in info.metadata if hasattr(bound, "ge")), None)
    high = next((bound.le for bound in info.metadata if hasattr(bound, "le")), None)
    if low is None:
        return f"must be {kind}"
    return f"must be {kind} from {low} to {high}" if high is not None else f"must be {kind} of at least {low}"


def _is_list(name: str) -> bool:
    return "tuple" in str(SpeculativeSettings.model_fields[name].annotation)
