"""The group of ranks that a layer's weights are split over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelGroup:
    """One rank's place in its tensor-parallel group. Layers take it as a parameter; size 1 is the whole weight."""

    rank: int = 0
    size: int = 1

    def split(self, total: int, what: str) -> int:
        """This rank's share of `total`.

        Raises:
            ValueError: the size does not divide it.
        """
        if total % self.size:
            raise ValueError(f"{what} = {total} cannot be split over {self.size} ranks")
        return total // self.size
