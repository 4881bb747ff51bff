"""How a draft's weights are stored: its own checkpoint's word, never the target's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from server.checkpoint.checkpoint import Checkpoint
from server.engine.components import Ask
from server.engine.models.config import ModelConfig
from server.engine.models.eagle3_config import Eagle3Config
from server.engine.models.linear_names import linear_names
from server.engine.models.mtp_config import MTPConfig
from server.engine.models.nextn_names import HEAD, LAYER
from server.engine.models.recurrent import RecurrentConfig
from server.engine.quantization.format import WeightFormat
from server.engine.quantization.formats import Formats, everything
from server.engine.quantization.resolve import resolve_formats
from server.errors import UserError
from server.spec.settings import KEY


@dataclass(frozen=True)
class DraftFormats:
    """The formats of the draft's checkpoint, and what they are for the modules that are the draft's."""

    formats: Formats
    labels: str
    """Joined with "+"."""
    experts: frozenset[WeightFormat]
    why: str


def draft_formats(
    checkpoint: Checkpoint, config: ModelConfig | RecurrentConfig, *, keep_blocks: bool = False
) -> DraftFormats:
    """Decide by headers and metadata, for the draft's modules alone; `keep_blocks` as in `resolve_formats`.

    Raises:
        UserError: one of them is stored in a way that cannot be served, or that contradicts the metadata.
    """
    try:
        layers, belongs, names = _modules(config)
        formats = resolve_formats(checkpoint, layers, names, keep_blocks=keep_blocks)
        labels = "+".join(sorted(formats.labels(belongs)))
        return DraftFormats(formats, labels, formats.experts(belongs), formats.why(belongs))
    except UserError as error:
        raise UserError(f"draft: {KEY}model {checkpoint.source}: {error}") from None


def check_quantization(ask: Ask, found: DraftFormats) -> None:
    """An explicit quantisation must be what the checkpoint holds.

    Raises:
        UserError: it is not.
    """
    if ask.requested in (None, "auto"):
        return
    labels, method = found.labels.split("+"), found.formats.method or "none"
    known = {method, found.labels, *labels, *(label.split("_")[0] for label in labels)}
    if ask.requested not in {name.replace("-", "_") for name in known}:
        raise UserError(
            f"draft: {ask.setting} {ask.requested!r}: the draft's checkpoint is stored as {found.labels} "
            f"(metadata: {method}). Leave it out, or name one of: auto, {', '.join(sorted(known))}."
        )


def _modules(
    config: ModelConfig | RecurrentConfig,
) -> tuple[ModelConfig, Callable[[str], bool], Iterator[str]]:
    """The model that the checkpoint describes, which of its modules are the draft's, and the draft's linear ones."""
    if isinstance(config, ModelConfig):
        return config, everything, linear_names(config)
    if isinstance(config, Eagle3Config):
        return config.model, everything, _eagle3_names(config)
    # The MTP layers as part of the model that they follow, be it in the same checkpoint or not.
    whole = replace(config.model, num_layers=config.first, num_nextn_predict_layers=config.model.num_layers)
    belongs = _of_mtp(config)
    return whole, belongs, (name for name in linear_names(whole) if belongs(name))


def _of_mtp(config: MTPConfig) -> Callable[[str], bool]:
    head = (config.head or "").removesuffix(".weight")

    def belongs(module: str) -> bool:
        layer = LAYER.fullmatch(module)
        if module == head:
            return True
        # Later layers' copies of the head are left aside.
        is_copy = layer is not None and f"{layer[2]}.weight" == HEAD
        return layer is not None and not is_copy and 0 <= int(layer[1]) - config.first < config.model.num_layers

    return belongs


def _eagle3_names(config: Eagle3Config) -> Iterator[str]:
    yield "fc"
    for name in linear_names(config.model):
        if name != "lm_head" or config.head == "own":
            yield name.removeprefix("model.")
