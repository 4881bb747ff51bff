"""Progress of loading, in bytes."""

from __future__ import annotations

from collections.abc import Callable

REPORTS = 200
"""A model may have 50 000 expert tensors: a report for each would be work of its own."""


class ByteProgress:
    """Counts bytes and calls `report(done, total)` at the start, at the end, and about `REPORTS` times between."""

    def __init__(self, total: int, report: Callable[[int, int], None]) -> None:
        self.total = total
        self.done = 0
        self._reported = 0
        self._report = report
        report(0, total)

    def add(self, count: int) -> None:
        """Count `count` more bytes."""
        self.done += count
        if self.done - self._reported >= self.total / REPORTS or self.done == self.total:
            self._reported = self.done
            self._report(self.done, self.total)
