"""The table of what was asked for and what it became, as people read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.messages import KVGroup

COLUMNS = ("role", "component", "requested", "resolved", "source", "why")


_PIPE_WIDTH = 200


class Row(Protocol):
    """One component of one role."""

    @property
    def role(self) -> str:
        """Target or draft."""

    @property
    def component(self) -> str:
        """What is resolved."""

    @property
    def requested(self) -> str:
        """What was asked for: "unset", "auto" or a name."""

    @property
    def resolved(self) -> str:
        """What it became."""

    @property
    def source(self) -> str:
        """Who decided: explicit, inherited, auto."""

    @property
    def why(self) -> str:
        """The reason."""


def give_room(console: Console) -> None:
    """Print as wide as the table is in a file or a pipe, where there is no terminal to fit it into."""
    if not console.is_terminal:
        console.width = _PIPE_WIDTH


def resolved_table(rows: Iterable[Row]) -> Table:
    """One line a row; where it is narrow, cells take several lines and lose nothing."""
    table = Table(box=None, pad_edge=False)
    for title in COLUMNS:
        table.add_column(title, overflow="fold")
    for row in rows:
        cells = (row.role, row.component, row.requested, row.resolved, row.source, row.why)
        table.add_row(*map(Text, cells))
    return table


def kv_group_line(group: KVGroup) -> str:
    """How one group of layers keeps its keys and values; the number of blocks is 0 before the cache is sized."""
    blocks = f"{group.num_blocks} blocks" if group.num_blocks else "blocks"
    return (
        f"KV group {group.group}: {group.layers} layers, {blocks} of {group.block_size} tokens, kernel pages of "
        f"{group.kernel_page_size}"
    )
