"""Figures made of the totals that `server.spec.counts` keeps: of a while, and as rates."""

from __future__ import annotations

from collections.abc import Sequence

from server.messages import DraftCounts


def since(earlier: DraftCounts, later: DraftCounts) -> DraftCounts:
    """What came between two snapshots of one server."""
    return DraftCounts(
        _minus(later.drafted, earlier.drafted),
        _minus(later.accepted, earlier.accepted),
        _minus(later.lengths, earlier.lengths),
        _minus(later.chosen, earlier.chosen),
    )


def rates(counts: DraftCounts) -> list[float | None]:
    """By position: accepted tokens per drafted one, 0 to 1; None where nothing was drafted."""
    pairs = zip(counts.accepted, counts.drafted, strict=True)
    return [accepted / drafted if drafted else None for accepted, drafted in pairs]


def acceptance_length(counts: DraftCounts) -> float | None:
    """Tokens that a step with a draft makes on average, the target's own among them; None without drafts."""
    drafts = sum(counts.lengths)
    return 1 + sum(counts.accepted) / drafts if drafts else None


def _minus(later: Sequence[int], earlier: Sequence[int]) -> list[int]:
    padded = [*earlier, *([0] * (len(later) - len(earlier)))]
    return [now - then for now, then in zip(later, padded, strict=True)]
