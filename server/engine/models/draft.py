"""What passes between a target model and a draft that reads its hidden states, and what such a draft is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from server.engine.layers.context import BuildContext
from server.engine.layers.embedding import VocabEmbedding
from server.engine.layers.linear import Linear
from server.errors import UserError


@dataclass(frozen=True)
class TargetHidden:
    """The target's hidden states of one step."""

    final: Tensor
    """[T, H], after the final norm."""
    aux: Tensor | None = None
    """[T, n * H], the residual stream at the n captured layer boundaries, from low to high; None without capture."""

    def select(self, indices: Tensor) -> TargetHidden:
        """The hidden states of some of the step's tokens: int64 [R]."""
        return TargetHidden(self.final[indices], None if self.aux is None else self.aux[indices])


@dataclass(frozen=True)
class DraftHidden:
    """What one draft step made."""

    output: Tensor
    """[T, H], for `RecurrentDraft.logits`."""
    recurrent: Tensor
    """[T, H], the next step's hidden states."""


@dataclass(frozen=True)
class Borrowed:
    """The target's modules, for a draft whose checkpoint has none of its own. They stay the target's to load."""

    embed_tokens: VocabEmbedding
    lm_head: Linear


class RecurrentDraft(Protocol):
    """A head that runs on hidden states: the target's at first, then its own.

    Slot i of its cache holds what it made of (hidden state at position i, token i + 1). Each step may overwrite slots:
    the first one does, with true hidden states, where earlier steps had guessed.
    """

    num_parameters: int
    """Its own, without what it borrows."""
    dtype: torch.dtype
    target_ids: Tensor | None
    """int64 [Vd], the target's id of each draft id; None when they are the same."""

    def combine(self, target: TargetHidden) -> Tensor:
        """The hidden states of the first step: [T, H of the draft]."""

    def __call__(self, hidden: Tensor, input_ids: Tensor, positions: Tensor, plan: Any, step: int) -> DraftHidden:
        """Run one step; `nn.Module` leads it to `forward`.

        Args:
            hidden: [T, H of the draft], from `combine` at step 0, else the `recurrent` of the step before; unchanged.
            input_ids: int64 [T], the token after each slot's position.
            positions: int64 [T], the slots' positions.
            plan: what the draft's attention backend planned for the step.
            step: 0 for the first drafted token, then 1, 2, …
        """

    def logits(self, output: Tensor) -> Tensor:
        """[R, H of the draft] -> [R, Vd]."""

    def highest(self, output: Tensor, vocab_size: int) -> Tensor:
        """The target's id, below `vocab_size`, that `logits` finds most probable: [R, H of the draft] -> int64 [R]."""

    def weight_targets(self) -> dict[str, Tensor]:
        """Checkpoint name -> the view of parameter memory that it fills; borrowed modules are not among them."""

    def ignored_weight(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is left aside on purpose."""

    def finish_loading(self) -> None:
        """Bring the filled weights into the layouts that the layers compute with; call it once."""


def check_borrowed(borrowed: Borrowed, context: BuildContext) -> None:
    """Check that a draft can compute with the target's modules.

    Raises:
        UserError: its dtype is another one.
    """
    dtype = borrowed.embed_tokens.weight.dtype
    if dtype is not context.dtype:
        raise UserError(
            f"the draft borrows the target's embedding or head, which are {str(dtype).removeprefix('torch.')}, but is "
            f"to run in {str(context.dtype).removeprefix('torch.')}; run both in one dtype"
        )
