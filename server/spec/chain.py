"""One drafted token after the other, for all rows that still want one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from server.engine.request import Draft
from server.engine.step import DraftRow

Pick = Callable[[Tensor, Sequence[DraftRow], int], tuple[Tensor, Tensor | None]]
"""([R, H], their rows, tokens drafted so far) -> int64 [R] of the target's ids, and the distribution [R, V] that
they were drawn from in float64, or None where they are the most probable ones."""


def draft_chain(
    rows: Sequence[DraftRow],
    limits: Sequence[int],
    output: Tensor,
    pick: Pick,
    run: Callable[[Sequence[DraftRow], Tensor, int], Tensor],
) -> list[Draft]:
    """Draft `limits[i]` tokens for `rows[i]`. Drafted ids stay on the device until all are there.

    Args:
        rows: R rows, longest draft first: those that still draft are always the leading ones.
        limits: R numbers, at least 1, descending.
        output: [R, H], what gives the first token's logits.
        pick: chooses a token for each row.
        run: (leading rows, their newest ids, tokens drafted so far) -> the next output.

    Returns:
        One a row.
    """
    columns: list[Tensor] = []
    shares: list[Tensor] = []
    for ahead in range(limits[0] if rows else 0):
        live = [row for row, limit in zip(rows, limits, strict=True) if limit > ahead]
        if ahead:
            output = run(live, columns[-1][: len(live)], ahead)
        ids, distribution = pick(output[: len(live)], live, ahead)
        columns.append(ids)
        if distribution is not None:
            shares.append(distribution)
    drafted = [column.tolist() for column in columns]
    return [
        Draft(
            tuple(column[i] for column in drafted[:limit]),
            torch.stack([distribution[i] for distribution in shares[:limit]]) if shares else None,
        )
        for i, limit in enumerate(limits)
    ]
