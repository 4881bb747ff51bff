"""Finding stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """A stop string that is complete."""

    stop: str
    end: int
    """Number of characters of the fed piece up to the end of the match."""


class StopMatcher:
    """Knuth-Morris-Pratt automata, one per stop string, fed character by character.

    The match that ends first wins, and of those the longest: this does not depend on how the text is cut into tokens.
    `held` is the length of the longest suffix of the text that a stop string may begin with; text before it is safe to
    send.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` must not hold empty strings."""
        self._stops = sorted(stops, key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def held(self) -> int:
        """Characters at the end of the text that may belong to a stop string."""
        return max(self._matched, default=0)

    def feed(self, piece: str, counts: bool = True) -> StopMatch | None:
        """Take the next piece; with `counts` False a match that ends in it is passed over."""
        for position, char in enumerate(piece, start=1):
            found: str | None = None
            for i, stop in enumerate(self._stops):
                borders, matched = self._borders[i], self._matched[i]
                while matched and stop[matched] != char:
                    matched = borders[matched]
                if stop[matched] == char:
                    matched += 1
                if matched == len(stop):
                    found = found or stop
                    matched = borders[matched]
                self._matched[i] = matched
            if found is not None and counts:
                return StopMatch(found, position)
        return None


def _borders(stop: str) -> list[int]:
    """For each prefix length, the length of its longest proper prefix that is also its suffix."""
    borders = [0, 0]
    length = 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = borders[length]
        if stop[length] == char:
            length += 1
        borders.append(length)
    return borders
