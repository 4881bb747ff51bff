"""The strict part of loading: every target filled exactly once, every tensor used or left aside on purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from server.engine.loading.progress import ByteProgress
from server.engine.loading.source import WeightSource
from server.engine.loading.workers import run_in_order
from server.errors import UserError

NAMED_IN_ERRORS = 4


def fill(
    targets: Mapping[str, Tensor],
    ignored: Callable[[str], bool],
    sources: Sequence[WeightSource],
    where: str,
    progress: Callable[[int, int], None],
) -> None:
    """Copy every source into its target.

    Args:
        targets: views of parameter memory by Hugging Face name; their shapes are the expected ones.
        ignored: names that are skipped unread.
        sources: the tensors of the checkpoint.
        where: the checkpoint, for errors.
        progress: called with (bytes done, bytes in all).

    Raises:
        UserError: a tensor is missing, unknown, there twice, misshapen, unreadable, or not finite. Names, shapes
            and types are checked before anything is read.
    """
    used = match(targets, ignored, sources, where)
    counter = ByteProgress(sum(source.nbytes for source in used), progress)

    def copy(source: WeightSource) -> None:
        target = targets[source.name]
        source.copy_to(target)
        _check_finite(source, target)

    for source in run_in_order(copy, used):
        counter.add(source.nbytes)


def match(
    targets: Mapping[str, Tensor], ignored: Callable[[str], bool], sources: Sequence[WeightSource], where: str
) -> list[WeightSource]:
    """The sources that fill the targets; see `fill`. Nothing is read.

    Raises:
        UserError: a tensor is missing, unknown, there twice, misshapen or of another type.
    """
    used: dict[str, WeightSource] = {}
    left_over = []
    for source in sources:
        target = targets.get(source.name)
        if target is None:
            if not ignored(source.name):
                left_over.append(source)
            continue
        if source.name in used:
            raise UserError(f"{source.file}: tensor {source.file_name} is a second {source.name}")
        if source.shape != tuple(target.shape):
            raise UserError(
                f"{source.file}: tensor {source.file_name} has shape {list(source.shape)}, but the model's config "
                f"makes {source.name} {list(target.shape)}"
            )
        used[source.name] = source
    missing = [name for name in targets if name not in used]
    if missing:
        raise UserError(f"{where} lacks {_count(len(missing), missing)}, which the model's config calls for")
    if left_over:
        names = [source.file_name for source in left_over]
        raise UserError(f"{left_over[0].file} holds {_count(len(names), names)}, which the model has no place for")
    for source in used.values():
        source.check(targets[source.name])
    return list(used.values())


def _count(count: int, names: Sequence[str]) -> str:
    listed = ", ".join(names[:NAMED_IN_ERRORS]) + (", …" if count > NAMED_IN_ERRORS else "")
    return f"tensor {listed}" if count == 1 else f"{count} tensors ({listed})"


def _check_finite(source: WeightSource, target: Tensor) -> None:
    """Refuse NaN and infinity; the two extremes of a tensor tell, at the cost of one pass over it."""
    if target.numel() == 0 or not target.is_floating_point():
        return
    if target.dtype is torch.float8_e4m3fn:
        nans = int((target.view(torch.uint8) & 0x7F == 0x7F).sum())  # it has no infinity
        if nans:
            raise UserError(f"{source.file}: tensor {source.file_name} holds {nans} values that are NaN")
        return
    low, high = torch.aminmax(target)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        bad = int((~torch.isfinite(target)).sum())
        raise UserError(
            f"{source.file}: tensor {source.file_name} holds {bad} values that are NaN, infinite, or beyond the range "
            f"of {str(target.dtype).removeprefix('torch.')}"
        )
