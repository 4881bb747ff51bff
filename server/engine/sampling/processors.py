"""Everything that changes logits before temperature: grammar, whitelist, bans, bias and penalties.

Each touches only the entries that it names, for all rows of a batch at once. Constants are written by `index_fill_`:
an assignment `x[entries] = constant` would make the host wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import embedding

from server.engine.sampling.request import SampleRow
from server.engine.sampling.transfer import to_device

_NEVER = float("-inf")
_ADDED = torch.where(((torch.arange(256)[:, None] >> torch.arange(8)) & 1).bool(), 0.0, _NEVER)
"""[256, 8] fp32: for each byte of a mask, what is added to its eight logits, low bit first."""


def masked_copy(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """A contiguous fp32 copy of logits [R, V] with -inf where a row's mask forbids the token."""
    masked = [(index, row.mask) for index, row in enumerate(rows) if row.mask is not None]
    if not masked:
        return logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    bits = np.stack([mask for _, mask in masked]).view(np.uint8).astype(np.int32)
    # Adding takes the same time for every mask; filling takes ten times as long where bits alternate.
    added = embedding(to_device(bits, logits.device), _ADDED.to(logits.device)).flatten(1)[:, : logits.shape[1]]
    if len(masked) == len(rows):
        return torch.add(logits, added).contiguous()
    copy = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return copy.index_add_(0, to_device(np.array([index for index, _ in masked]), logits.device), added)


def apply_processors(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Change logits in place, in the order of the functions below; the order is that of vLLM.

    Bans and whitelists of rows with a mask are left to `masked_copy`.

    Args:
        logits: [R, V], fp32, contiguous.
        rows: R rows; ids in them are below V.
    """
    _keep_allowed(logits, rows)
    _ban(logits, rows)
    _add_bias(logits, rows)
    _penalise(logits, rows)


def _keep_allowed(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    limited = [
        (index, row.request.allowed)
        for index, row in enumerate(rows)
        if row.mask is None and row.request.allowed is not None
    ]
    if not limited:
        return
    entries = _entries(logits, limited)
    kept = logits.view(-1)[entries]
    logits.index_fill_(0, to_device(np.array([index for index, _ in limited]), logits.device), _NEVER)
    logits.view(-1)[entries] = kept


def _ban(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """`bad_words`, `logit_bias` of -100, and the stop ids until `min_tokens` exist."""
    banned = (
        (index, np.array(list(ids), dtype=np.int64))
        for index, row in enumerate(rows)
        if row.mask is None and (ids := row.request.banned(row.output, row.draft))
    )
    entries = _entries(logits, banned)
    if len(entries):
        logits.view(-1).index_fill_(0, entries, _NEVER)


def _add_bias(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    biased = [(index, row.request) for index, row in enumerate(rows) if len(row.request.bias_ids)]
    if not biased:
        return
    entries = _entries(logits, ((index, request.bias_ids) for index, request in biased))
    values = np.concatenate([request.bias_values for _, request in biased])
    logits.view(-1)[entries] += to_device(values, logits.device)


def _penalise(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Repetition penalty, then presence and frequency penalty.

    Repetition (CTRL, arXiv:1909.05858, as in transformers): a token of the prompt or output has its positive logit
    divided, its negative one multiplied. Presence and frequency (OpenAI API reference): subtract
    `presence_penalty * (count > 0) + frequency_penalty * count`, counted over the output.
    """
    penalised = [(index, row) for index, row in enumerate(rows) if row.request.penalised]
    if not penalised:
        return
    found = [row.request.occurrences(row.output, row.draft) for _, row in penalised]
    sizes = [len(occurrences.ids) for occurrences in found]
    entries = _entries(logits, ((index, one.ids) for (index, _), one in zip(penalised, found, strict=True)))
    if not len(entries):
        return

    def per_entry(values: Iterable[float]) -> npt.NDArray[np.float32]:
        return np.repeat(np.fromiter(values, dtype=np.float32), sizes)

    params = [row.request.params for _, row in penalised]
    count = np.concatenate([occurrences.generated for occurrences in found]).astype(np.float32)
    present = np.concatenate([occurrences.present for occurrences in found])
    factor = np.where(present, per_entry(one.repetition_penalty for one in params), np.float32(1))
    less = per_entry(one.frequency_penalty for one in params) * count
    less += per_entry(one.presence_penalty for one in params) * (count > 0)
    multiplier = to_device(factor, logits.device)
    values = logits.view(-1)[entries]
    values = torch.where(values > 0, values / multiplier, values * multiplier) - to_device(less, logits.device)
    logits.view(-1)[entries] = values


def _entries(logits: Tensor, ids: Iterable[tuple[int, npt.NDArray[np.int64]]]) -> Tensor:
    """Indices into the flattened logits of (row, ids) pairs, on the device of the logits."""
    vocab_size = logits.shape[1]
    flat = [index * vocab_size + one for index, one in ids]
    return to_device(np.concatenate(flat) if flat else np.empty(0, dtype=np.int64), logits.device)
