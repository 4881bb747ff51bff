"""What a draft must do over several steps, whatever its arithmetic: compare paged steps with whole recomputations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from draft_steps import PagedDraft
from torch import Tensor

TOLERANCE = 1e-4
Whole = Callable[[Tensor, list[int], int], tuple[Tensor, Tensor]]
"""(hidden of all slots, their ids, step) -> output and recurrent hidden state of the last slot, fp64."""


def check_chains(draft: PagedDraft, whole: Whole, true_hidden: dict[str, Tensor], ids: dict[str, list[int]]) -> None:
    """Draft, verify and draft again for several rows at once.

    Args:
        draft: the paged draft.
        whole: the reference.
        true_hidden: for each row, what `combine` made of the target's hidden states: [slots, H].
        ids: for each row, the token of each slot.
    """
    chunk = {name: len(own) // 2 for name, own in ids.items()}
    kept = {name: len(own) - 4 for name, own in ids.items()}
    # The prompt in two chunks, then a chain of three further tokens.
    draft.step({name: (0, true_hidden[name][:at], ids[name][:at]) for name, at in chunk.items()}, 0)
    _chain(draft, whole, true_hidden, ids, chunk, kept, 3)
    # Three of four were confirmed: their slots are made again, from true hidden states.
    _chain(draft, whole, true_hidden, ids, kept, {name: end + 3 for name, end in kept.items()}, 4)
    # One token at a time, for one row alone, out of the order that the rows had.
    name = list(ids)[-1]
    end = len(ids[name])
    _chain(draft, whole, true_hidden, {name: ids[name]}, {name: end - 1}, {name: end}, 2)


def _chain(
    draft: PagedDraft,
    whole: Whole,
    true_hidden: dict[str, Tensor],
    ids: dict[str, list[int]],
    start: dict[str, int],
    end: dict[str, int],
    length: int,
) -> None:
    rows = {n: (start[n], true_hidden[n][start[n] : end[n]], ids[n][start[n] : end[n]]) for n in ids}
    inputs = {name: (true_hidden[name][: end[name]].double(), ids[name][: end[name]]) for name in ids}
    for step in range(length):
        made = draft.step(rows, step)
        rows = {}
        for name, (hidden, tokens) in inputs.items():
            output, recurrent = whole(hidden, tokens, step)
            logits = draft.model.logits(made[name].output)
            assert logits[-1].std() > 0.1  # differences of 1e-4 mean something
            assert _difference(made[name].output[-1], output) < TOLERANCE
            assert _difference(made[name].recurrent[-1], recurrent) < TOLERANCE
            token = int(logits[-1].argmax())
            token = token if draft.model.target_ids is None else int(draft.model.target_ids[token])
            rows[name] = (len(tokens), made[name].recurrent[-1:], [token])
            inputs[name] = (torch.cat((hidden, recurrent[None])), [*tokens, token])


def _difference(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    assert torch.isfinite(got).all()
    # Hidden states before the last norm have no scale of their own.
    return float((got.double() - expected).abs().max() / max(1.0, float(expected.abs().max())))
