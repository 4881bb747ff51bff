"""What `outrider check` reports: the plan, without building anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from server.messages import KVGroup


@dataclass(frozen=True)
class CheckRow:
    """One component of one role: what was asked for, what it became, and what could not serve."""

    role: Literal["target", "draft"]
    component: str
    requested: str
    """"unset", "auto" or the name."""
    resolved: str
    source: Literal["explicit", "inherited", "auto"]
    why: str = ""
    rejected: tuple[tuple[str, str], ...] = ()
    """Candidates that cannot serve, each with the reason."""


@dataclass(frozen=True)
class CheckReport:
    """The whole plan, or why there is none."""

    ok: bool
    """Whether the server would start."""
    rows: tuple[CheckRow, ...] = ()
    kv_groups: tuple[KVGroup, ...] = ()
    errors: tuple[str, ...] = ()
