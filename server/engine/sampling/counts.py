"""How often each token occurs in a request's history, kept up to date token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_COMPARE = 1024


@dataclass(frozen=True)
class Occurrences:
    """The distinct tokens of a history."""

    ids: npt.NDArray[np.int64]
    """[N], distinct, in no order."""
    generated: npt.NDArray[np.int32]
    """[N], occurrences among the generated tokens; 0 for one that only the prompt has, or that was taken back."""
    present: npt.NDArray[np.bool_]
    """[N], whether the prompt or the generated tokens hold it."""


class TokenCounts:
    """Token counts of one request that follow any output: longer, shorter or different from the last one.

    Each call compares the output with the one that was counted, takes back what differs and adds what is new; the
    comparison is of whole slices, so that a long unchanged output costs microseconds.
    """

    def __init__(self, prompt_ids: npt.NDArray[np.int64], vocab_size: int) -> None:
        """Start with nothing generated.

        Args:
            prompt_ids: distinct prompt tokens that count as present from the start (empty where the prompt is not
                to count).
            vocab_size: tokens from it on (a draft may hold some) are not counted.
        """
        self._vocab_size = vocab_size
        self._ids = prompt_ids.copy()
        self._from_prompt = len(prompt_ids)
        self._generated = np.zeros(len(prompt_ids), dtype=np.int32)
        self._slot = {token: slot for slot, token in enumerate(prompt_ids.tolist())}
        self._counted: list[int] = []
        self._committed = 0

    def follow(self, output: Sequence[int], draft: Sequence[int] = ()) -> Occurrences:
        """Count exactly `output` followed by `draft`; the latter is expected to change at the next call."""
        self._shrink(self._committed)
        self._shrink(common_prefix(self._counted, output))
        self._extend(output[len(self._counted) :])
        self._committed = len(self._counted)
        self._extend(draft)
        used = len(self._slot)
        generated = self._generated[:used].copy()
        present = generated > 0
        present[: self._from_prompt] = True
        return Occurrences(self._ids[:used], generated, present)

    def _shrink(self, length: int) -> None:
        for token in self._counted[length:]:
            if token < self._vocab_size:
                self._generated[self._slot[token]] -= 1
        del self._counted[length:]

    def _extend(self, tokens: Sequence[int]) -> None:
        self._counted.extend(tokens)
        for token in tokens:
            if token >= self._vocab_size:
                continue
            slot = self._slot.setdefault(token, len(self._slot))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(slot + 64, dtype=np.int64)])
                self._generated = np.concatenate([self._generated, np.zeros(slot + 64, dtype=np.int32)])
            self._ids[slot] = token
            self._generated[slot] += 1


def common_prefix(counted: list[int], output: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(counted), len(output))
    for start in range(0, shorter, _COMPARE):
        stop = min(start + _COMPARE, shorter)
        if counted[start:stop] != list(output[start:stop]):
            return next(i for i in range(start, stop) if counted[i] != output[i])
    return shorter
