"""Where a request stands in its grammar, and which tokens may follow: exact under drafts, rollback and preemption."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from server.engine.sampling.counts import common_prefix

Mask: TypeAlias = npt.NDArray[np.uint32]
"""[W], one bit per id, from the lowest on: set where the token may come next."""

_ALL = np.uint32(0xFFFFFFFF)
_SLOW_MASKS = 64
_SLOW_SECONDS = 0.005
"""Processor time of a mask on average; that of common schemas is a hundredth of it."""


class GrammarError(Exception):
    """The grammar cannot be followed further. The message is for the user."""


class GrammarState:
    """Follows any output: longer, shorter or different from the last one, as preemption and drafts have it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_ids: frozenset[int]) -> None:
        """Stand at the beginning.

        Args:
            matcher: at the beginning; it stays there. Its tokenizer has one id more than can be sampled, its own end
                of text, so that "complete" is a bit of the mask whatever the model's end of text is.
            vocab_size: ids that can be sampled.
            end_ids: those that end an answer where the grammar is complete.
        """
        self._pristine = matcher
        self._matcher = matcher.deep_copy()
        self._vocab_size = vocab_size
        self.end_ids = end_ids
        self._consumed: list[int] = []
        self._masks = 0
        self._seconds = 0.0

    def mask(self, output: Sequence[int], draft: Sequence[int] = ()) -> Mask:
        """Tokens that may follow `output` and `draft`; all of them beyond the answer's end.

        Raises:
            GrammarError: the grammar cannot be followed to there.
        """
        words = empty_mask(self._vocab_size)
        if not self._follow(output, draft):
            words[:] = _ALL
            return words
        started = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        self._count(time.thread_time() - started)
        if self._consumed and self._matcher.is_stopped():
            words[:] = _ALL
        elif _holds(words, self._vocab_size):
            remove(words, (self._vocab_size,))
            _insert(words, self.end_ids)
        return words

    def ended(self, output: Sequence[int]) -> bool:
        """Whether the answer is over: the grammar leaves nothing to add, or the last token is one that ends it."""
        try:
            return not self._follow(output, ()) or self._matcher.is_stopped()
        except GrammarError:
            return False  # the next mask says why

    def admitted(self, output: Sequence[int], draft: Sequence[int]) -> int:
        """How many leading tokens of a draft the grammar allows after `output`, up to one that ends the answer."""
        try:
            if not self._follow(output, ()) or self._matcher.is_stopped():
                return 0
            for count, token in enumerate(draft):
                complete = self._matcher.is_accepting()
                if not self._consume(token):
                    return count + 1 if complete and token in self.end_ids else count
                if self._matcher.is_stopped():
                    return count + 1
        except GrammarError:
            return 0  # the next mask says why
        return len(draft)

    def _follow(self, output: Sequence[int], draft: Sequence[int]) -> bool:
        """Stand after `output` and `draft`; False when the answer ended before."""
        kept = common_prefix(self._consumed, output)
        if kept == len(output):
            kept += common_prefix(self._consumed[kept:], draft)
        surplus = len(self._consumed) - kept
        if surplus:
            del self._consumed[kept:]
            if not self._matcher.rollback(surplus):
                self._check()
        rest: Iterable[int] = chain(output[kept:], draft[max(0, kept - len(output)) :])
        return all(self._consume(token) for token in rest)

    def _count(self, seconds: float) -> None:
        """A grammar that takes much longer than any sensible one would hold up everybody else."""
        self._masks += 1
        self._seconds += seconds
        mean = self._seconds / self._masks
        if self._masks >= _SLOW_MASKS and mean > _SLOW_SECONDS:
            raise GrammarError(
                f"The grammar is too ambiguous: following it takes {mean * 1000:.0f} ms of processor time a token, "
                f"more than {_SLOW_SECONDS * 1000:.0f} ms."
            )

    def _consume(self, token: int) -> bool:
        if self._matcher.try_consume_tokens([token]) == 1:
            self._consumed.append(token)
            return True
        self._check()
        return False

    def _check(self) -> None:
        """A matcher never leaves an error behind; a new one may still follow an output that stops short of it."""
        if not self._matcher.is_error():
            return
        problem = self._matcher.get_error().splitlines()[0]
        self._matcher = self._pristine.deep_copy()
        self._consumed = []
        raise GrammarError(f"The grammar became too complex to follow at this point of the answer: {problem[:200]}.")


def empty_mask(vocab_size: int) -> Mask:
    """No bit set, with room for the grammar's own end of text after the vocabulary."""
    return np.zeros(vocab_size // 32 + 1, dtype=np.uint32)


def mask_of(ids: npt.NDArray[np.int64], vocab_size: int) -> Mask:
    """The bits of these ids."""
    words = empty_mask(vocab_size)
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return words


def remove(words: Mask, ids: Iterable[int]) -> None:
    """Clear bits."""
    for token in ids:
        words[token >> 5] &= ~np.uint32(1 << (token & 31))


def _insert(words: Mask, ids: Iterable[int]) -> None:
    for token in ids:
        words[token >> 5] |= np.uint32(1 << (token & 31))


def _holds(words: Mask, token: int) -> bool:
    return bool(words[token >> 5] >> np.uint32(token & 31) & np.uint32(1))
