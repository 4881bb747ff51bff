"""One drafted token after the other, for all rows that still want one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from server.engine.request import Draft
from server.engine.step import DraftRow
from server.spec.choice import DraftChoice


def draft_chain(
    rows: Sequence[DraftRow],
    limits: Sequence[int],
    choice: DraftChoice,
    output: Tensor,
    logits: Callable[[Tensor], Tensor],
    run: Callable[[Sequence[DraftRow], Tensor, int], Tensor],
    target_ids: Tensor | None = None,
) -> list[Draft]:
    """Draft `limits[i]` tokens for `rows[i]`. Drafted ids stay on the device until all are there.

    Args:
        rows: R rows, longest draft first: those that still draft are always the leading ones.
        limits: R numbers, at least 1, descending.
        choice: how a token is chosen.
        output: [R, H], what gives the first token's logits.
        logits: [R, H] -> [R, V] over the target's vocabulary.
        run: (leading rows, their newest ids, tokens drafted so far) -> the next output.
        target_ids: int64, the target's id of each column where the logits are not over its vocabulary; greedy only.

    Returns:
        One a row.
    """
    columns: list[Tensor] = []
    shares: list[Tensor] = []
    for ahead in range(limits[0] if rows else 0):
        live = [row for row, limit in zip(rows, limits, strict=True) if limit > ahead]
        if ahead:
            output = run(live, columns[-1][: len(live)], ahead)
        ids, distribution = choice.pick(logits(output[: len(live)]), [row.request for row in live], ahead)
        columns.append(ids if target_ids is None else target_ids[ids])
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
