"""The draft vocabulary of an EAGLE-3 head: which of the target's ids its head scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from server.checkpoint.tensor_header import TensorHeader
from server.engine.loading.mapped_file import MappedFiles
from server.errors import UserError


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """Vd ids of the target's V."""

    size: int
    """Vd."""
    target_ids: Tensor | None
    """int64 [Vd] on the CPU; None when draft ids are the target's."""
    why: str
    """How the map was read, for the user."""


def draft_vocab(size: int, vocab_size: int, d2t: TensorHeader | None, t2d: TensorHeader | None) -> DraftVocab:
    """Read and check the map.

    `d2t` holds offsets: id i of the draft is i + d2t[i] of the target. Some converters write the target's ids instead;
    that is recognised where it can be. The mask `t2d`, true at the ids, decides in doubt.

    Args:
        size: Vd.
        vocab_size: V.
        d2t: the map's header, if the file has it.
        t2d: the mask's.

    Raises:
        UserError: the map is missing, of the wrong shape or type, points outside the target's vocabulary or twice to
            the same id, or contradicts the mask.
    """
    if d2t is None:
        if size != vocab_size:
            raise UserError(
                f"the EAGLE-3 head scores {size} of the target's {vocab_size} tokens, but its file holds no d2t, the "
                "map from one to the other"
            )
        return DraftVocab(size, None, "the target's vocabulary")
    values = _read(d2t, size, {"I64": torch.int64})
    mask = None if t2d is None else _read(t2d, vocab_size, {"BOOL": torch.bool, "U8": torch.uint8}).bool()
    ids, why = _target_ids(values, vocab_size, mask)
    if size == vocab_size and torch.equal(ids, torch.arange(size)):
        return DraftVocab(size, None, "the target's vocabulary")
    return DraftVocab(size, ids, f"{size} of {vocab_size} tokens, {why}")


def _target_ids(d2t: Tensor, vocab_size: int, mask: Tensor | None) -> tuple[Tensor, str]:
    offsets = d2t + torch.arange(len(d2t))
    readings = ((offsets, "d2t holds offsets"), (d2t, "d2t holds the target's ids"))
    for ids, why in readings:
        if mask is not None:
            if _valid(ids, vocab_size) and torch.equal(mask.nonzero().flatten(), ids.sort().values):
                return ids, why
        # Ids of a vocabulary are sorted, so as ids they rise strictly.
        elif _valid(ids, vocab_size) and (ids is offsets or bool((ids.diff() > 0).all())):
            return ids, why
    if mask is not None and any(_valid(ids, vocab_size) for ids, _ in readings):
        raise UserError(
            f"the EAGLE-3 head's d2t and t2d contradict each other: t2d marks {int(mask.sum())} ids, and they are not "
            "those that d2t leads to"
        )
    distinct = len(set(offsets.tolist()))
    raise UserError(
        f"the EAGLE-3 head's d2t leads to ids {int(offsets.min())} to {int(offsets.max())}, of which "
        f"{distinct} of {len(offsets)} differ; they must be distinct and below the target's vocabulary "
        f"size {vocab_size}. Is it a head for another model?"
    )


def _valid(ids: Tensor, vocab_size: int) -> bool:
    return bool(((ids >= 0) & (ids < vocab_size)).all()) and len(set(ids.tolist())) == len(ids)


def _read(header: TensorHeader, size: int, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    # Never by way of the model's dtype: bf16 cannot hold ids above 256.
    if header.shape != (size,) or header.dtype not in dtypes:
        raise UserError(
            f"{header.file}: tensor {header.name} is {header.dtype} {list(header.shape)}; it must be "
            f"{' or '.join(dtypes)} [{size}]"
        )
    return MappedFiles().bytes_of(header).view(dtypes[header.dtype]).clone()
