"""What became of the drafts, position by position. Plain totals, so that whoever shows them needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from server.messages import DraftCounts, RequestOutput


class AcceptanceCounter:
    """Totals since the start. Position 0 is a draft's first token; the target's own token after it counts nowhere."""

    def __init__(self, max_tokens: int) -> None:
        """All zeros.

        Args:
            max_tokens: the longest draft, k.
        """
        self._drafted = [0] * max_tokens
        self._accepted = [0] * max_tokens
        self._lengths = [0] * (max_tokens + 1)
        self._chosen = [0] * (max_tokens + 1)

    def add(self, outputs: Iterable[RequestOutput]) -> None:
        """Count the drafts that a step verified."""
        for output in outputs:
            if output.drafted:
                for position in range(output.drafted):
                    self._drafted[position] += 1
                for position in range(output.accepted):
                    self._accepted[position] += 1
                self._lengths[output.accepted] += 1

    def chose(self, length: int) -> None:
        """Count a step that let its requests draft so many tokens."""
        self._chosen[length] += 1

    def snapshot(self) -> DraftCounts:
        """The totals now."""
        return DraftCounts(list(self._drafted), list(self._accepted), list(self._lengths), list(self._chosen))
