"""The target's hidden states of tokens that a head has not taken in, because nothing was drafted after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from server.engine.models.draft import TargetHidden
from server.engine.request import Request
from server.engine.step import DraftRow

_MOST_TOKENS = 256
"""A sequence, which bounds the memory: 256 tokens of 4 hidden states of 4096 in bf16 are 8 MiB."""


@dataclass
class _Kept:
    begin: int
    """Position of the first token."""
    end: int
    states: list[TargetHidden] = field(default_factory=list)


class RestedStates:
    """By request, those that directly precede its next step; a request that begins anew loses them."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Request, _Kept] = WeakKeyDictionary()

    def is_full(self, row: DraftRow) -> bool:
        """Whether a sequence has so many that the head should take them in."""
        kept = self._kept.get(row.request)
        return kept is not None and kept.end - kept.begin >= _MOST_TOKENS

    def keep(self, rows: Sequence[tuple[DraftRow, int]], hidden: TargetHidden) -> None:
        """Keep a step's.

        Args:
            rows: with the number of tokens of each.
            hidden: of these tokens, one row after the other; nobody may write to it.
        """
        at = 0
        for row, count in rows:
            kept = self._kept.get(row.request)
            if kept is None or kept.end != row.start:
                kept = self._kept[row.request] = _Kept(row.start, row.start)
            part = slice(at, at + count)
            kept.states.append(TargetHidden(hidden.final[part], None if hidden.aux is None else hidden.aux[part]))
            kept.end += count
            at += count

    def begin(self, row: DraftRow) -> int:
        """Where the head is to begin: at the first token kept, or where the step began."""
        kept = self._kept.get(row.request)
        return kept.begin if kept is not None and kept.end == row.start else row.start

    def take(self, row: DraftRow) -> list[TargetHidden]:
        """Those before the step's tokens, which are kept no longer."""
        kept = self._kept.pop(row.request, None)
        return kept.states if kept is not None and kept.end == row.start else []
