"""Drafts copied from the sequence itself: what followed the last tokens when they came before.

Prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from server.engine.models.draft import TargetHidden
from server.engine.request import NO_DRAFT, Draft, Request
from server.engine.step import DraftRow


class NgramProposer:
    """The longest match wins, the most recent of equally long ones; without a match there is no draft."""

    last_slot_looks_ahead: ClassVar[bool] = False

    def __init__(self, shortest: int, longest: int) -> None:
        """Make a proposer.

        Args:
            shortest: tokens that a match must have at least.
            longest: tokens of the sequence's end that are looked for at most.
        """
        self._shortest = shortest
        self._longest = longest
        self._histories: WeakKeyDictionary[Request, _History] = WeakKeyDictionary()

    def propose(self, rows: Sequence[DraftRow], hidden: TargetHidden) -> list[Draft]:
        """See `Proposer.propose`."""
        return [self._draft(row) if row.limit else NO_DRAFT for row in rows]

    def rest(self, rows: Sequence[DraftRow], hidden: TargetHidden) -> list[Draft]:
        """See `Proposer.rest`."""
        return [NO_DRAFT] * len(rows)

    def _draft(self, row: DraftRow) -> Draft:
        history = self._histories.setdefault(row.request, _History())
        tokens = history.follow(row.request.tokens)
        end = latest_match(tokens, self._shortest, self._longest)
        return NO_DRAFT if end is None else Draft(tuple(tokens[end : end + row.limit].tolist()))


def latest_match(tokens: npt.NDArray[np.int64], shortest: int, longest: int) -> int | None:
    """Where an earlier occurrence of the sequence's end ends.

    Args:
        tokens: [L].
        shortest: tokens that must match at least.
        longest: tokens that are compared at most.

    Returns:
        The index after the longest match (the last of equally long ones), or None.
    """
    length = len(tokens)
    # ends[i]: the match would end just before this index. A match may overlap the end of the sequence, not be it.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1 if length else np.empty(0, np.int64)
    best: int | None = None
    for size in range(1, longest + 1):
        if size > 1:
            ends = ends[ends >= size]
            ends = ends[tokens[ends - size] == tokens[length - size]] if size < length else ends[:0]
        if not len(ends):
            break
        if size >= shortest:
            best = int(ends[-1])
    return best


class _History:
    """A sequence's tokens as an array that grows with it."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.int64)
        self._length = 0

    def follow(self, tokens: list[int]) -> npt.NDArray[np.int64]:
        if len(tokens) > len(self._memory):
            grown = np.empty(2 * len(tokens), np.int64)
            grown[: self._length] = self._memory[: self._length]
            self._memory = grown
        self._memory[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)
        return self._memory[: self._length]
