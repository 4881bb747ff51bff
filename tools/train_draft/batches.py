"""Training batches: sequences of like length, padded, with what the target knows at each position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tools.train_draft.chain_attention import Window
from tools.train_draft.hidden import HiddenStates, Place

_HELD_OUT, _MOST_HELD_OUT = 40, 1000
"""Every so many-th sequence is never trained on, and about so many at most."""


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
        anchors = torch.arange(int((self.lengths - self.first).max()), device=self.first.device)
        b, w = (anchors <= (self.lengths - self.first)[:, None] - 2 - step).nonzero(as_tuple=True)
        return b, w


class Batches:
    """Draws batches of about as many tokens, in a new order each epoch."""

    def __init__(
        self, states: Sequence[HiddenStates], hidden_size: int, tokens: int, seed: int, device: torch.device
    ) -> None:
        """Split off what is held out.

        Args:
            states: where the sequences are.
            hidden_size: H.
            tokens: of a batch, padding included.
            seed: of the order.
            device: of the batches.
        """
        every = [(one, place) for one in states for place in one.sequences]
        apart = max(_HELD_OUT, len(every) // _MOST_HELD_OUT)
        self.held_out = every[::apart]
        self.training = [one for i, one in enumerate(every) if i % apart]
        self.num_tokens = sum(place.length - place.prompt for _, place in self.training)
        """Answer tokens to train on."""
        self._hidden_size = hidden_size
        self._tokens = tokens
        self._seed = seed
        self._device = device

    def epoch(self, number: int) -> list[list[tuple[HiddenStates, Place]]]:
        """The batches of one epoch, as places."""
        random = np.random.default_rng((self._seed, number))
        # Of like length within pieces, so that little is padding and batches still differ from epoch to epoch.
        order = random.permutation(len(self.training))
        batches: list[list[tuple[HiddenStates, Place]]] = []
        for piece in np.array_split(order, max(1, len(order) // 1024)):
            batches += self._batches(sorted((self.training[i] for i in piece), key=lambda one: one[1].length))
        return [batches[i] for i in random.permutation(len(batches))]

    def held_out_batches(self) -> Iterator[TrainingBatch]:
        """What is not trained on."""
        for places in self._batches(sorted(self.held_out, key=lambda one: one[1].length)):
            yield self.load(places)

    def load(self, places: Sequence[tuple[HiddenStates, Place]]) -> TrainingBatch:
        """Gather a batch on the device, from the device on which its states are."""
        longest = max(place.length for _, place in places)
        tokens = torch.zeros(len(places), longest, dtype=torch.int64, device=self._device)
        width = places[0][0].hidden.shape[1]
        states = torch.zeros(len(places), longest, width, dtype=torch.bfloat16, device=self._device)
        for i, (source, place) in enumerate(places):
            end = place.start + place.length
            tokens[i, : place.length] = source.tokens[place.start : end]
            states[i, : place.length] = source.hidden[place.start : end]
        return TrainingBatch(
            tokens,
            states[..., : -self._hidden_size],
            states[..., -self._hidden_size :],
            torch.tensor([place.prompt for _, place in places], device=self._device),
            torch.tensor([place.length for _, place in places], device=self._device),
        )

    def _batches(self, ordered: Sequence[tuple[HiddenStates, Place]]) -> Iterator[list[tuple[HiddenStates, Place]]]:
        batch: list[tuple[HiddenStates, Place]] = []
        for one in ordered:
            if batch and (len(batch) + 1) * max(one[1].length, batch[-1][1].length) > self._tokens:
                yield batch
                batch = []
            batch.append(one)
        if batch:
            yield batch
