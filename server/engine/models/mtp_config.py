"""MTP layers that lie behind a model's own (GLM-4.5; the names are DeepSeek-V3's): which there are, and their shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from server.checkpoint.tensor_header import TensorHeader
from server.engine.models.config import ModelConfig
from server.engine.models.nextn_names import EMBEDDING, HEAD, LAYER, hf_names, nextn_layers
from server.engine.models.registry import FAMILIES
from server.errors import UserError

_TOP_EMBEDDING = "model.embed_tokens.weight"
_TOP_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class MTPConfig:
    """Everything that building the layers needs to know."""

    model: ModelConfig
    """Their shape: `num_layers` counts the MTP layers, and all of them have experts where the model has any."""
    first: int
    """Index of the first in tensor names."""
    embedded: bool
    """Whether the checkpoint holds the target's own layers too."""
    embedding: str | None
    """The tensor; None when the target's is borrowed."""
    head: str | None
    """The tensor; None when the target's is borrowed."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was inferred and how, for the user."""
        ends = "; ".join(
            f"{what}: {name or 'the target’s'}" for what, name in (("embedding", self.embedding), ("head", self.head))
        )
        return (f"MTP layers: {self.model.num_layers}, from model.layers.{self.first}", ends)

    @property
    def capture(self) -> tuple[int, ...]:
        """Nothing: MTP layers read the target's final hidden states."""
        return ()

    @classmethod
    def read(cls, config: Mapping[str, Any], headers: Mapping[str, TensorHeader], target: ModelConfig) -> MTPConfig:
        """Read the target's checkpoint, or a folder with MTP layers alone.

        Args:
            config: the checkpoint's.
            headers: its tensors; empty for random weights, and then the config decides.
            target: the model they draft for.

        Raises:
            UserError: no MTP weights, fewer layers than the config promises, or layers for another model.
        """
        model = ModelConfig.from_hf(_with_known_architecture(config))
        layers = nextn_layers(headers)
        promised = model.num_nextn_predict_layers
        if headers:
            _check_complete(layers, promised, model.num_layers)
        elif not promised:
            raise UserError("no MTP weights: the config promises none (num_nextn_predict_layers is 0 or absent)")
        first = min(layers, default=model.num_layers)
        count = len(layers) if headers else promised
        for key in ("hidden_size", "vocab_size"):
            own, theirs = getattr(model, key), getattr(target, key)
            if own != theirs:
                raise UserError(f"the MTP layers' {key} {own} is not the target's {theirs}: they are for another model")
        every = tuple(range(count))
        names = hf_names(headers)
        embedded = any((match := LAYER.fullmatch(name)) and int(match[1]) < first for name in names)
        return cls(
            model=replace(
                model,
                num_layers=count,
                moe=replace(model.moe, layers=every) if model.moe else None,
                num_nextn_predict_layers=0,
            ),
            first=first,
            embedded=embedded,
            embedding=_end(EMBEDDING, _TOP_EMBEDDING, first, names, embedded),
            head=_end(HEAD, _TOP_HEAD, first, names, embedded),
        )


def _check_complete(layers: Mapping[int, Any], promised: int, num_layers: int) -> None:
    if not layers:
        why = f"the config promises {promised}, but" if promised else "the config promises none, and"
        raise UserError(
            f"no MTP weights: {why} the checkpoint holds no model.layers.{num_layers}.eh_proj.weight. Quantised copies "
            "often leave the MTP layers out; take a checkpoint that has them, or another speculative method"
        )
    found = list(layers)
    if found != list(range(found[0], found[0] + max(len(found), promised))):
        listed = ", ".join(map(str, found))
        raise UserError(
            f"no MTP weights for every layer: the config promises {promised}, and the checkpoint holds layer {listed}"
        )


def _end(own: str, top: str, first: int, names: set[str], embedded: bool) -> str | None:
    """The layer's own tensor; in a folder of MTP layers alone, also that of the model's name."""
    name = f"model.layers.{first}.{own}"
    if name in names:
        return name
    return top if top in names and not embedded else None


def _with_known_architecture(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Folders with MTP layers alone often name a class of their own; the layers are those of the model's family."""
    if any(name in FAMILIES for name in config.get("architectures") or []):
        return config
    model_type = str(config.get("model_type", "")).removesuffix("_mtp")
    family = next((family for family in FAMILIES.values() if family.model_type == model_type), None)
    return config if family is None else {**config, "architectures": [family.architecture]}
