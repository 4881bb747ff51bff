"""Notices drafts that something is wrong with: the text stays right then, so only the counts can tell.

near_zero   of all drafted tokens hardly any is accepted: say, the draft's weights are not those of its config
collapsed   a draft's first token is fine and its second one never: say, the draft reads its own cache wrongly
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from server.messages import DraftCounts
from server.spec.acceptance import rates, since

Kind = Literal["near_zero", "collapsed"]

WINDOW_DRAFTS = 200
"""Drafts that are judged together."""
NEAR_ZERO = 0.02
"""Accepted per drafted token, below which near_zero barks."""
HEALTHY = 0.5
"""Acceptance of position 0, from which on collapsed looks at position 1."""
COLLAPSE = 0.1
"""Share of position 0's acceptance, below which position 1, in drafts that get that far, has collapsed."""
ENOUGH = 100
"""Drafts that get as far as position 1, for a judgement on collapse."""


@dataclass(frozen=True)
class Change:
    """A watchdog that begins or ceases to bark."""

    kind: Kind
    barks: bool
    message: str
    """For the log."""


class AcceptanceWatchdog:
    """Judges each `WINDOW_DRAFTS` drafts; an episode lasts until a later window is fine again."""

    def __init__(self) -> None:
        self._begin = DraftCounts()
        self._barks: dict[Kind, bool] = {"near_zero": False, "collapsed": False}

    def observe(self, totals: DraftCounts) -> list[Change]:
        """Take the engine's newest totals, and say what has changed."""
        if sum(totals.lengths) - sum(self._begin.lengths) < WINDOW_DRAFTS:
            return []
        window, self._begin = since(self._begin, totals), totals
        verdicts = {"near_zero": _near_zero(window), "collapsed": _collapsed(window)}
        changes = []
        for kind, barks in self._barks.items():
            verdict = verdicts[kind]
            if verdict is not None and verdict.barks != barks:
                self._barks[kind] = verdict.barks
                changes.append(verdict)
        return changes


def _near_zero(window: DraftCounts) -> Change:
    drafted, accepted = sum(window.drafted), sum(window.accepted)
    counted = f"{accepted} of {drafted} drafted tokens ({accepted / drafted:.1%}) were accepted"
    if accepted < NEAR_ZERO * drafted:
        return Change(
            "near_zero",
            True,
            f"drafts are worth nothing: {counted}. The answers are right, only slow. Is the draft the one that was "
            "made for this model, and are its weights loaded? /v1/server_info shows what was built.",
        )
    return Change("near_zero", False, f"drafts are worth something again: {counted}")


def _collapsed(window: DraftCounts) -> Change | None:
    """None without enough drafts to judge by."""
    if len(window.drafted) < 2:
        return None
    first, second = rates(window)[:2]
    if first is None or second is None or first * window.drafted[1] < ENOUGH:
        return None
    share = second / first
    counted = f"position 0 is accepted in {first:.0%}, position 1 in {share:.1%} of the drafts that get there"
    if first >= HEALTHY and share < COLLAPSE * first:
        return Change(
            "collapsed",
            True,
            f"drafts collapse after their first token: {counted}. The answers are right, only slow. That is what a "
            "draft looks like that misreads its own KV cache: please report it with /v1/server_info, and see whether "
            "another --block-size or speculative_config.attention_backend helps.",
        )
    return Change("collapsed", False, f"drafts no longer collapse after their first token: {counted}")
