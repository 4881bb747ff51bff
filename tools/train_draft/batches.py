"""Training batches: sequences of like length, padded, with what the target knows at each position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tools.train_draft.chain_attention import Window
from tools.train_draft.hidden import HiddenFolder, Place


@dataclass(frozen=True)
class TrainingBatch:
    """B sequences of up to L tokens."""

    tokens: Tensor
    """int64 [B, L]; 0 behind the end."""
    aux: Tensor
    """bf16 [B, L, n * H], the captured hidden states."""
    final: Tensor
    """bf16 [B, L, H], after the target's norm."""
    first: Tensor
    """int64 [B], the first answer token's position."""
    lengths: Tensor
    """int64 [B]."""

    def window(self) -> Window:
        """The anchors: from the last prompt token on, where the first draft is made."""
        return Window.over(self.first - 1, int((self.lengths - self.first).max()), self.tokens.shape[1])

    def rows(self, step: int) -> tuple[Tensor, Tensor]:
        """(b, w): the anchors of the window whose draft number `step` foresees a token of the answer."""
        anchors = torch.arange(int((self.lengths - self.first).max()))
        b, w = (anchors <= (self.lengths - self.first)[:, None] - 2 - step).nonzero(as_tuple=True)
        return b, w


class Batches:
    """Draws batches of about as many tokens, in a new order each epoch."""

    def __init__(
        self, folders: Sequence[HiddenFolder], hidden_size: int, tokens: int, seed: int, held_out: int = 40
    ) -> None:
        """Split off what is held out.

        Args:
            folders: where the sequences are.
            hidden_size: H.
            tokens: of a batch, padding included.
            seed: of the order.
            held_out: every so many-th sequence is never trained on.
        """
        every = [(folder, place) for folder in folders for place in folder.sequences]
        self.held_out = every[::held_out]
        self.training = [one for i, one in enumerate(every) if i % held_out]
        self.num_tokens = sum(place.length - place.prompt for _, place in self.training)
        """Answer tokens to train on."""
        self._hidden_size = hidden_size
        self._tokens = tokens
        self._seed = seed

    def epoch(self, number: int) -> list[list[tuple[HiddenFolder, Place]]]:
        """The batches of one epoch, as places."""
        random = np.random.default_rng((self._seed, number))
        # Of like length within pieces, so that little is padding and batches still differ from epoch to epoch.
        order = random.permutation(len(self.training))
        batches: list[list[tuple[HiddenFolder, Place]]] = []
        for piece in np.array_split(order, max(1, len(order) // 1024)):
            batches += self._batches(sorted((self.training[i] for i in piece), key=lambda one: one[1].length))
        return [batches[i] for i in random.permutation(len(batches))]

    def held_out_batches(self) -> Iterator[TrainingBatch]:
        """What is not trained on."""
        for places in self._batches(sorted(self.held_out, key=lambda one: one[1].length)):
            yield self.load(places)

    def load(self, places: Sequence[tuple[HiddenFolder, Place]]) -> TrainingBatch:
        """Read a batch."""
        longest = max(place.length for _, place in places)
        width = places[0][0].hidden.shape[1]
        tokens = torch.zeros(len(places), longest, dtype=torch.int64)
        states = torch.zeros(len(places), longest, width, dtype=torch.bfloat16)
        for i, (folder, place) in enumerate(places):
            end = place.start + place.length
            tokens[i, : place.length] = torch.from_numpy(folder.tokens[place.start : end].astype(np.int64))
            states[i, : place.length] = folder.hidden[place.start : end]
        return TrainingBatch(
            tokens,
            states[..., : -self._hidden_size],
            states[..., -self._hidden_size :],
            torch.tensor([place.prompt for _, place in places]),
            torch.tensor([place.length for _, place in places]),
        )

    def _batches(self, ordered: Sequence[tuple[HiddenFolder, Place]]) -> Iterator[list[tuple[HiddenFolder, Place]]]:
        batch: list[tuple[HiddenFolder, Place]] = []
        for one in ordered:
            if batch and (len(batch) + 1) * max(one[1].length, batch[-1][1].length) > self._tokens:
                yield batch
                batch = []
            batch.append(one)
        if batch:
            yield batch
