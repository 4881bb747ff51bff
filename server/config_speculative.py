"""The draft's settings from flags, variables and the file: gathered, and merged key by key.

A block (`--speculative-config '{…}'`, OUTRIDER_SPECULATIVE, `speculative:` in the file) and single keys
(`--speculative-config.KEY`, OUTRIDER_SPECULATIVE__KEY) of one source belong together; a single key is the stronger one.
A null block takes away what weaker sources say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from server.config_faults import UsageError, nearest_name
from server.spec.settings import SpeculativeSettings

FLAG = "--speculative-config"
SETTING = "speculative"
OTHER_SPELLING = "speculative_config"
"""Taken for the block in the file and in variables, too, since the flag is spelt so."""

KEYS = tuple(SpeculativeSettings.model_fields)

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class Given:
    """A value and where it was given, with the value, as the user wrote it."""

    value: Any
    place: str


@dataclass(frozen=True)
class DraftLayer:
    """What one source says about the draft."""

    values: Mapping[str, Given] | None = None
    """None when it does not speak of the draft; an empty block does."""
    clears: bool = False
    """Whether it takes away what weaker sources say."""


def from_flags(flags: Mapping[str, Any]) -> DraftLayer:
    """Of parsed flags, `speculative` (the block as text) and `speculative.KEY`.

    Raises:
        UsageError: the block is no JSON object, or has an unknown or repeated key.
    """
    keys = {
        key: Given(flags[f"{SETTING}.{key}"], f"{FLAG}.{key} {_shown(flags[f'{SETTING}.{key}'])}")
        for key in KEYS
        if f"{SETTING}.{key}" in flags
    }
    block = flags.get(SETTING)
    return DraftLayer(keys or None) if block is None else _from_json(block, FLAG, keys)


def from_variables(variables: Mapping[str, str], prefix: str) -> DraftLayer:
    """Of the environment, SPECULATIVE (the block as JSON) and SPECULATIVE__KEY behind the prefix; empty is unset.

    Raises:
        UsageError: the block is no JSON object, or there is an unknown or repeated key.
    """
    blocks: dict[str, str] = {}
    keys: dict[str, Given] = {}
    for name, text in variables.items():
        if not text or not is_variable(name, prefix):
            continue
        if "__" not in name:
            blocks[name] = text
            continue
        key = _variable_key(name)
        if key in keys:
            raise UsageError(f"{name} and {keys[key].place} are the same setting; keep one")
        keys[key] = Given(text, f"{name}={_shown(text)}")
    if len(blocks) > 1:
        raise UsageError(f"{' and '.join(blocks)} are the same setting; keep one")
    for name, text in blocks.items():
        return _from_json(text, name, keys)
    return DraftLayer(keys or None)


def nearest_key(wrong: str, spell: Callable[[str], str] = str) -> str:
    """A clause that names the nearest right key, as `spell` writes it, or all keys when none is near."""
    close = nearest_name(wrong, KEYS)
    return f"; did you mean {spell(close)}?" if close else f"; there are {', '.join(map(spell, KEYS))}"


def is_variable(name: str, prefix: str) -> bool:
    """Whether a variable is one of the draft's, with a right key or a wrong one."""
    return name.partition("__")[0] in (prefix + SETTING.upper(), prefix + OTHER_SPELLING.upper())


def from_file(block: yaml.Node, loader: yaml.SafeLoader, path: object) -> DraftLayer:
    """The value of `speculative` in the file.

    Raises:
        UsageError: it is neither a mapping nor null, or has an unknown or repeated key.
    """
    if isinstance(block, yaml.MappingNode):
        pairs = [
            (f"--config {path}, line {key.start_mark.line + 1}", str(key.value), loader.construct_object(value, True))
            for key, value in block.value
        ]
        return DraftLayer(_checked(pairs))
    if loader.construct_object(block) is None:
        return DraftLayer(clears=True)
    raise UsageError(
        f"--config {path}, line {block.start_mark.line + 1}: {SETTING} must be a mapping of the draft's settings, such "
        f"as `{SETTING}: {{method: ngram}}`, or null"
    )


def merge(
    weakest_first: Iterable[DraftLayer], unless_said: Mapping[str, Given] | None = None
) -> dict[str, Given] | None:
    """The draft's settings of all sources; None when nothing speaks of a draft, or the last word is that there is none.

    Args:
        weakest_first: what the sources say.
        unless_said: settings where no source says a method or a model, and none turns speculation off.

    Raises:
        UsageError: a source gives the method "none" and other settings of the draft.
    """
    merged: dict[str, Given] | None = None
    off = False
    for layer in weakest_first:
        values = layer.values
        none = _is_none(values)
        if layer.clears or none:
            merged, off = None, True
        if values is not None and not none:
            merged, off = {**(merged or {}), **values}, False
    if unless_said is None or off or (merged is not None and merged.keys() & {"method", "model"}):
        return merged
    return {**unless_said, **(merged or {})}


def _is_none(values: Mapping[str, Given] | None) -> bool:
    """Whether a source turns speculation off by the method's name."""
    method = None if values is None else values.get("method")
    if values is None or method is None or str(method.value).lower() != "none":
        return False
    others = sorted(values.keys() - {"method"})
    if others:
        raise UsageError(f"draft setting {values[others[0]].place}: does nothing beside method none. Leave one out.")
    return True


def _variable_key(name: str) -> str:
    begin, _, suffix = name.partition("__")
    key = suffix.lower()
    if key not in KEYS:
        raise UsageError(f"unknown variable {name}{nearest_key(key, lambda right: f'{begin}__{right.upper()}')}")
    return key


class _Pairs(list[tuple[str, Any]]):
    """A JSON object whose keys may repeat."""


def _from_json(text: str, place: str, keys: Mapping[str, Given]) -> DraftLayer:
    example = '\'{"method": "ngram"}\''
    try:
        block = json.loads(text, object_pairs_hook=_Pairs)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(
            f"{place} {_shown(text)}: is not JSON ({error}); it is a JSON object such as {example}"
        ) from None
    if block is None:
        return DraftLayer(keys or None, clears=True)
    if not isinstance(block, _Pairs):
        raise UsageError(f"{place} {_shown(text)}: must be a JSON object such as {example}, or null")
    values = _checked([(place, key, _plain(value)) for key, value in block])
    return DraftLayer({**values, **keys})


def _plain(value: Any) -> Any:
    if isinstance(value, _Pairs):
        return {key: _plain(item) for key, item in value}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _checked(pairs: Iterable[tuple[str, str, Any]]) -> dict[str, Given]:
    """From (place, key, value) to values by key."""
    values: dict[str, Given] = {}
    for place, spelt, value in pairs:
        key = spelt.replace("-", "_")
        if key not in KEYS:
            raise UsageError(f"{place}: unknown draft setting {_shown(spelt)}{nearest_key(key)}")
        if key in values:
            raise UsageError(f"{place}: {key} is given twice")
        values[key] = Given(value, f"{place}, {key}: {_shown(value)}")
    return values


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
