"""From logits to tokens: edits the logits, shapes each row's distribution and draws from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from server.engine.sampling.distribution import (
    MAX_VOCAB_SIZE,
    Candidates,
    Shaping,
    best_k,
    greedy,
    nucleus,
    unranked,
)
from server.engine.sampling.logprobs import token_logprobs
from server.engine.sampling.processors import apply_processors, masked_copy
from server.engine.sampling.random import Purpose, uniforms
from server.engine.sampling.request import SampleRow
from server.engine.sampling.transfer import to_device
from server.messages import SamplingParams, TokenLogprobs

_AT_ONCE_CPU = 2**19
"""Logits shaped at once: the caches then hold most of what is made of them."""
_AT_ONCE = 2**25
"""The same on a GPU, to bound the memory."""


@dataclass(frozen=True)
class Sampled:
    """One token per row."""

    token_ids: Tensor
    """[R] int64, on the device of the logits."""
    logprobs: list[TokenLogprobs | None]
    """R entries; None where the request does not ask."""


class Sampler:
    """Draws the next token of every row; a row's token does not depend on the other rows."""

    def __call__(self, logits: Tensor, rows: list[SampleRow]) -> Sampled:
        """Sample.

        Args:
            logits: [R, V], any float dtype, finite or -inf; not changed.
            rows: R rows whose requests share one `vocab_size`, at most V: ids from it on (an embedding's padding)
                are never sampled.

        Raises:
            ValueError: more than `MAX_VOCAB_SIZE` ids can be sampled.
        """
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        random = None if all(row.request.greedy for row in rows) else to_device(_uniforms(rows), logits.device)
        for indices, candidates in _distributions(logits, rows):
            drawn = candidates.draw(None if random is None else _select(random, indices))
            if len(indices) == len(rows):
                token_ids = drawn
            else:
                token_ids[to_device(np.array(indices), logits.device)] = drawn
        return Sampled(token_ids, _logprobs(logits, rows, token_ids))


def target_probabilities(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """The distribution that `Sampler` draws each row from, [R, V] float64; a greedy row is one-hot.

    Arguments and errors are those of `Sampler`.
    """
    probabilities = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    for indices, candidates in _distributions(logits, rows):
        vocab_size = rows[0].request.vocab_size
        selected = to_device(np.array(indices), logits.device)
        probabilities[selected, :vocab_size] = candidates.probabilities(vocab_size)
    return probabilities


def _uniforms(rows: Sequence[SampleRow]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return uniforms([row.request.params.seed for row in rows], [row.position for row in rows], Purpose.SAMPLE)


def _distributions(logits: Tensor, rows: list[SampleRow]) -> Iterator[tuple[list[int], Candidates]]:
    """The rows' distributions, some rows of the same kind at a time: their indices and candidates.

    A row's kind, and with it every operation on the row, depends on its own parameters alone.
    """
    if not rows:
        return
    vocab_size = rows[0].request.vocab_size
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"the sampler can choose among {MAX_VOCAB_SIZE} ids at most, not {vocab_size}")
    if logits.shape[1] != vocab_size:
        logits = logits[:, :vocab_size]
    if any(row.request.edited(row.position) for row in rows):
        logits = masked_copy(logits, rows)
        apply_processors(logits, rows)
    at_once = _AT_ONCE_CPU if logits.device.type == "cpu" else _AT_ONCE
    kinds: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        kinds.setdefault(_kind(row), []).append(index)
    for kind, members in kinds.items():
        step = len(members) if kind in ("greedy", "best_k") else max(1, at_once // vocab_size)
        for start in range(0, len(members), step):
            indices = members[start : start + step]
            yield indices, _shape(kind, _select(logits, indices), [rows[index] for index in indices])


def _select(values: Tensor, indices: list[int]) -> Tensor:
    """Entries of the first dimension, for ascending indices: a view where they are neighbours."""
    first, last = indices[0], indices[-1]
    if last - first + 1 == len(indices):
        return values[first : last + 1]
    return values[to_device(np.array(indices), values.device)]


def _kind(row: SampleRow) -> str:
    if row.request.greedy:
        return "greedy"
    if 0 < row.request.params.top_k < row.request.vocab_size:
        return "best_k"
    return "nucleus" if row.request.params.top_p < 1 else "unranked"


def _shape(kind: str, logits: Tensor, rows: list[SampleRow]) -> Candidates:
    if kind == "greedy":
        return greedy(logits)
    params = [row.request.params for row in rows]
    shaping = _shaping(params, any(row.limited for row in rows), logits.device)
    logits = logits.to(torch.float32)
    if kind == "best_k":
        return best_k(logits, shaping, max(one.top_k for one in params))
    return nucleus(logits, shaping) if kind == "nucleus" else unranked(logits, shaping)


def _shaping(params: list[SamplingParams], limited: bool, device: torch.device) -> Shaping:
    def column(values: list[float], dtype: type) -> Tensor:
        return to_device(np.array(values, dtype=dtype)[:, None], device)

    min_p, top_p = [one.min_p for one in params], [one.top_p for one in params]
    return Shaping(
        temperature=column([one.temperature for one in params], np.float32),
        min_p=column(min_p, np.float32) if any(min_p) else None,
        top_p=column(top_p, np.float64) if min(top_p) < 1 else None,
        top_k=column([one.top_k for one in params], np.int64),
        limited=limited,
    )


def _logprobs(logits: Tensor, rows: list[SampleRow], token_ids: Tensor) -> list[TokenLogprobs | None]:
    answers: list[TokenLogprobs | None] = [None] * len(rows)
    wanted = {i: count for i, row in enumerate(rows) if (count := row.request.params.logprobs) is not None}
    if not wanted:
        return answers
    indices = to_device(np.array(list(wanted)), logits.device)
    part = logits if len(wanted) == len(rows) else logits[indices]
    scored = token_logprobs(part, token_ids[indices].tolist(), max(wanted.values()))
    for (index, count), one in zip(wanted.items(), scored, strict=True):
        answers[index] = TokenLogprobs(one.logprob, one.rank, one.top_ids[:count], one.top_logprobs[:count])
    return answers
