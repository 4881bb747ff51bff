"""What became of the drafts of one client request."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.messages import RequestOutput


@dataclass
class DraftTally:
    """Counts of all its sequences together, as the engine made them."""

    drafted: int = 0
    """Drafted tokens that were verified."""
    accepted: int = 0
    lengths: list[int] = field(default_factory=list)
    """Steps with a draft, by the number of tokens accepted; as long as the most that were."""

    @property
    def steps(self) -> int:
        """Steps that verified a draft."""
        return sum(self.lengths)

    def add(self, output: RequestOutput) -> None:
        """Take note of one step's output."""
        if not output.drafted:
            return
        self.drafted += output.drafted
        self.accepted += output.accepted
        self.lengths += [0] * (output.accepted + 1 - len(self.lengths))
        self.lengths[output.accepted] += 1
