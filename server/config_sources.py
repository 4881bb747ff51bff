"""Where settings come from: flags, then OUTRIDER_* variables, then the --config file, then the defaults.

Whatever is misspelt in any of them is an error that names the nearest right name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from server.config import Settings, flag_name, flag_of
from server.config_draft_default import default_draft
from server.config_draft_faults import draft_settings
from server.config_faults import UsageError, nearest, plain_words
from server.config_speculative import (
    KEYS,
    OTHER_SPELLING,
    SETTING,
    DraftLayer,
    from_file,
    from_flags,
    from_variables,
    is_variable,
    merge,
)

PREFIX = "OUTRIDER_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
"""Names the YAML file, as --config does."""

_SERVICE_LINK = re.compile(r"OUTRIDER_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)


class _Outside(Settings, BaseSettings):
    """The tree as pydantic-settings reads it from variables; values stay text until `Settings` judges them all."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", env_ignore_empty=True, enable_decoding=False
    )


def resolve(flags: Mapping[str, Any], config_file: str | None) -> Settings:
    """Merge the sources, strongest first.

    Args:
        flags: setting names with the values given on the command line; `speculative.KEY` is one key of the draft's.
        config_file: the path given with --config, or None.

    Raises:
        UsageError: an unknown name, an impossible value, or a file that cannot be read.
    """
    variables = read_variables()
    file = config_file or os.environ.get(CONFIG_VARIABLE) or None
    in_file, draft_in_file = read_file(Path(file)) if file is not None else ({}, DraftLayer())
    plain_flags = {name: value for name, value in flags.items() if name.partition(".")[0] != SETTING}
    layers: list[tuple[str, Mapping[str, Any]]] = [
        ("flag", plain_flags),
        ("variable", variables),
        (file or "", in_file),
    ]
    merged: dict[str, Any] = {}
    for _, values in reversed(layers):
        merged.update(values)
    faults: list[str] = []
    draft = merge(
        [draft_in_file, from_variables(os.environ, PREFIX), from_flags(flags)],
        default_draft(merged),
    )
    if draft is not None:
        try:
            merged[SETTING] = draft_settings(draft)
        except UsageError as error:
            faults.append(str(error))
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        raise UsageError("\n".join([*(_explain(detail, layers) for detail in error.errors()), *faults])) from None
    if faults:
        raise UsageError("\n".join(faults))
    return settings


def read_variables() -> dict[str, Any]:
    """The settings among this process's OUTRIDER_* variables, as text; the draft's are left to `from_variables`.

    Raises:
        UsageError: a variable with our prefix that is no setting, or one that Kubernetes put there.
    """
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {CONFIG_VARIABLE}
    for name, value in os.environ.items():
        if not name.upper().startswith(PREFIX):
            continue
        if _SERVICE_LINK.fullmatch(name) or (name.endswith("PORT") and _SERVICE_LINK_VALUE.match(value)):
            raise UsageError(
                f"{name}={value} is not a setting of yours: Kubernetes puts such variables into every pod for a "
                "Service whose name begins with outrider. Set enableServiceLinks: false in the pod's spec, or rename "
                "the Service."
            )
        if name not in known and not is_variable(name, PREFIX):
            keys = {f"{PREFIX}{SETTING.upper()}__{key.upper()}" for key in KEYS}
            raise UsageError(f"unknown variable {name}{nearest(name.upper(), known | keys)}")
    if os.environ.get(PREFIX + "API_KEY") == "":
        raise UsageError(f"{PREFIX}API_KEY is empty; unset it to serve without authentication")
    found = EnvSettingsSource(_Outside)()
    found.pop(SETTING, None)
    return found


def read_file(path: Path) -> tuple[dict[str, Any], DraftLayer]:
    """The settings in a YAML file, and what it says about the draft; keys are written with _ or with -.

    Raises:
        UsageError: the file cannot be read, is no mapping, or has an unknown or repeated key.
    """
    try:
        document = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"--config {path}: is not YAML: {error}") from None
    if document is None:
        return {}, DraftLayer()
    if not isinstance(document, yaml.MappingNode):
        raise UsageError(f"--config {path}: must be a mapping of settings to values, such as `port: 8000`")
    loader = yaml.SafeLoader("")
    settings: dict[str, Any] = {}
    draft: DraftLayer | None = None
    for key_node, value_node in document.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value).replace("-", "_")
        if key in (SETTING, OTHER_SPELLING):
            if draft is not None:
                raise UsageError(f"--config {path}, line {line}: {SETTING} is given twice")
            draft = from_file(value_node, loader, path)
            continue
        if key not in Settings.model_fields:
            raise UsageError(
                f"--config {path}, line {line}: unknown key {key_node.value!r}{nearest(key, Settings.model_fields)}"
            )
        if key in settings:
            raise UsageError(f"--config {path}, line {line}: {key} is given twice")
        settings[key] = loader.construct_object(value_node, deep=True)
    return settings, draft or DraftLayer()


def _explain(detail: Any, layers: list[tuple[str, Mapping[str, Any]]]) -> str:
    """One fault in the user's words: where the value was given, the value, and what it must be."""
    message = plain_words(str(detail["msg"]))
    if not detail["loc"]:
        return message
    name = str(detail["loc"][0])
    for source, values in layers:
        if name in values:
            value = "" if name == "api_key" else values[name]  # a key never reaches a terminal or a log
            return f"{_place(name, source, value)}: {message}"
    return f"{flag_name(name)}: {message}"


def _place(name: str, source: str, value: object) -> str:
    if source == "flag":
        return f"{'MODEL' if flag_of(name).positional else flag_name(name)} {value}".rstrip()
    if source == "variable":
        return f"{PREFIX}{name.upper()}={value}"
    return f"--config {source}, {name}: {value}".rstrip(": ")
