"""How many tokens a draft is worth before it is checked, from how earlier ones fared."""

from __future__ import annotations

_MEMORY = 0.99
"""What the counts keep of their weight with each draft that reaches a position: the last 100 or so count."""
_PRIOR, _PRIOR_ACCEPTED = 4.0, 2.0
"""What is believed before the first draft."""


class AcceptanceEstimate:
    """By position, the share of drafts that were accepted there of those accepted up to there."""

    def __init__(self, max_tokens: int) -> None:
        self._reached = [_PRIOR] * max_tokens
        self._accepted = [_PRIOR_ACCEPTED] * max_tokens

    def add(self, drafted: int, accepted: int) -> None:
        """Take note of a checked draft."""
        for position in range(min(accepted + 1, drafted)):
            self._reached[position] = _MEMORY * self._reached[position] + 1
            self._accepted[position] = _MEMORY * self._accepted[position] + (position < accepted)

    def tokens(self, drafted: int) -> float:
        """Tokens that a step is expected to make from so long a draft, 1 + a_0 + a_0 a_1 + … of them."""
        total = reached = 1.0
        for position in range(drafted):
            reached *= self._accepted[position] / self._reached[position]
            total += reached
        return total
