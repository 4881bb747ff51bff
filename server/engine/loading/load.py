"""Weights into a built model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.gguf_header import read_gguf_header
from server.checkpoint.headers import read_headers
from server.engine.loading.dummy import fill_with_random
from server.engine.loading.fill import fill, match
from server.engine.loading.gguf_source import gguf_sources
from server.engine.loading.safetensors_source import safetensors_sources
from server.engine.loading.source import WeightSource
from server.errors import UserError

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


class Loadable(Protocol):
    """What loading needs of a model."""

    def weight_targets(self) -> dict[str, Tensor]:
        """Return parameter memory by Hugging Face checkpoint name."""

    def ignored_weight(self, name: str) -> bool:
        """Whether a tensor of this name is left aside on purpose."""

    def finish_loading(self) -> None:
        """Bring the filled weights into the layout that the layers compute with."""


@torch.no_grad()
def load_weights(
    model: Loadable, checkpoint: Checkpoint, load_format: str, seed: int, progress: Callable[[int, int], None]
) -> str:
    """Fill a model with the checkpoint's weights, or with random ones.

    Args:
        model: its parameters exist and hold nothing yet.
        checkpoint: as located.
        load_format: "auto" takes the checkpoint's own format; "dummy" reads no file and draws random weights.
        seed: of the random weights.
        progress: called with (bytes done, bytes in all).

    Returns:
        What was read: "safetensors", "gguf" or "dummy".

    Raises:
        UserError: the checkpoint has no weights in this format, or they are not exactly those of the model; the message
            names file and tensor.
    """
    if load_format == "dummy":
        fill_with_random(model.weight_targets(), seed, progress)
    else:
        targets = model.weight_targets()
        sources = _sources(checkpoint, load_format, targets)
        fill(targets, model.ignored_weight, sources, str(checkpoint.path), progress)
    model.finish_loading()
    return load_format if load_format == "dummy" else checkpoint.format


def match_weights(model: Loadable, checkpoint: Checkpoint, load_format: str) -> None:
    """Check by the headers alone that `load_weights` would find exactly the tensors that the model calls for.

    Raises:
        UserError: see `load_weights`.
    """
    if load_format != "dummy":
        targets = model.weight_targets()
        sources = _sources(checkpoint, load_format, targets)
        match(targets, model.ignored_weight, sources, str(checkpoint.path))


def resolve_load_format(checkpoint: Checkpoint, load_format: str, setting: str = "--load-format") -> str:
    """Return "safetensors", "gguf" or "dummy": what `load_weights` will do.

    Args:
        checkpoint: as located.
        load_format: as asked for.
        setting: what the user calls it.

    Raises:
        UserError: the checkpoint has no weights, or none in the format asked for.
    """
    if load_format not in LOAD_FORMATS:
        raise UserError(f"load format {load_format!r} is not known; known are {', '.join(LOAD_FORMATS)}")
    if load_format == "dummy" or load_format == checkpoint.format:
        return load_format
    if checkpoint.format == "config":
        pickles = sorted(path.name for path in checkpoint.path.glob("*.bin"))
        has = f" ({pickles[0]} is a pickle, which is never read: convert it to safetensors)" if pickles else ""
        raise UserError(f"{checkpoint.path} holds no safetensors weights{has}; {setting} dummy needs none")
    if load_format != "auto":
        raise UserError(f"{checkpoint.path} holds {checkpoint.format} weights, but the load format is {load_format}")
    return checkpoint.format


def _sources(checkpoint: Checkpoint, load_format: str, targets: Mapping[str, Tensor]) -> Sequence[WeightSource]:
    if resolve_load_format(checkpoint, load_format) == "gguf":
        raw = {name for name, target in targets.items() if target.dtype is torch.uint8}
        return gguf_sources(read_gguf_header(checkpoint.path), checkpoint.config, raw)
    return safetensors_sources(read_headers(checkpoint))
