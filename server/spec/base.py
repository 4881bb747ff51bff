"""What a proposer is: after each step it says what may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from server.engine.models.draft import TargetHidden
from server.engine.request import Draft
from server.engine.step import DraftRow


class Proposer(Protocol):
    """Makes drafts, and keeps whatever it needs to make them in step with the target's cache."""

    last_slot_looks_ahead: ClassVar[bool]
    """Whether its cache entry at a position is made from the token after it."""

    def propose(self, rows: Sequence[DraftRow], hidden: TargetHidden) -> list[Draft]:
        """Take note of a step and draft.

        Args:
            rows: every row of the step, those that may not draft now (limit 0) among them.
            hidden: the target's hidden states of all the step's tokens.

        Returns:
            One a row, of at most its limit's tokens; `NO_DRAFT` where there is nothing to propose.
        """

    def rest(self, rows: Sequence[DraftRow], hidden: TargetHidden) -> list[Draft]:
        """Take note of a step after which nothing is drafted, for as little work as can be; arguments as `propose`."""
