"""Drafts that run on hidden states, by kind: their config from a checkpoint, and the model from the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from server.checkpoint.tensor_header import TensorHeader
from server.engine.layers.context import BuildContext
from server.engine.models.config import ModelConfig
from server.engine.models.draft import Borrowed
from server.engine.models.eagle3 import Eagle3Draft
from server.engine.models.eagle3_config import Eagle3Config
from server.engine.models.mtp import MTPDraft
from server.engine.models.mtp_config import MTPConfig
from server.errors import UserError

RecurrentConfig = Eagle3Config | MTPConfig


def read_recurrent_config(
    kind: Literal["eagle3", "mtp"],
    config: Mapping[str, Any],
    headers: Mapping[str, TensorHeader],
    target: ModelConfig,
    aux_override: Sequence[int] | None = None,
) -> RecurrentConfig:
    """See `Eagle3Config.read` and `MTPConfig.read`."""
    if kind == "eagle3":
        return Eagle3Config.read(config, headers, target, aux_override)
    return MTPConfig.read(config, headers, target)


def build_recurrent(config: RecurrentConfig, context: BuildContext, borrowed: Borrowed) -> Eagle3Draft | MTPDraft:
    """Allocate a draft; its memory is not initialised.

    Raises:
        UserError: more than one rank, or a draft that borrows and has another dtype than the target.
    """
    if context.group.size != 1:
        raise UserError(f"the draft's tensor_parallel_size = {context.group.size} is not supported; it must be 1")
    if isinstance(config, Eagle3Config):
        return Eagle3Draft(config, context, borrowed)
    return MTPDraft(config, context, borrowed)
