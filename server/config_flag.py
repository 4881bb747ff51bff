"""How a setting appears on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Group = Literal["server", "model", "engine", "draft", "memory", "logging"]

GROUP_TITLES: dict[Group, str] = {
    "server": "server",
    "model": "model",
    "engine": "engine and scheduling",
    "draft": "draft (speculative decoding)",
    "memory": "memory",
    "logging": "logging and metrics",
}


@dataclass(frozen=True)
class Flag:
    """How a setting appears on the command line."""

    group: Group
    help: str
    metavar: str | None = None
    """The kind of value, with its unit."""
    unset: str | None = None
    """What happens when it is not given, where the default is None."""
    positional: bool = False
    repeated: bool = False
    name: str | None = None
    """The flag, where it is not the setting's name with dashes."""
