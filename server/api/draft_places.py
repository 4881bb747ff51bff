"""Where each token of an output stood in the draft that proposed it."""

from __future__ import annotations

from server.messages import RequestOutput


def draft_places(output: RequestOutput) -> list[int | None]:
    """For each of `token_ids` its place in its draft, from 0; None for a token that the target made."""
    if output.draft_places is not None:
        return output.draft_places
    return [place if place < output.accepted else None for place in range(len(output.token_ids))]
