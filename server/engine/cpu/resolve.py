"""The plan's question about a target: which forms of its weights are kept on a CPU."""

from __future__ import annotations

from math import prod

import torch

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.headers import read_headers
from server.engine.check import CheckRow
from server.engine.components import Ask
from server.engine.cpu.choice import SETTING, ChoiceNeed, CpuWeights, choose_forms
from server.engine.cpu.forms import WeightForms
from server.engine.cpu.measure import most_packed_tokens
from server.engine.models.config import ModelConfig
from server.engine.quantization.ggml import GgmlBlocks
from server.engine.quantization.int4 import Int4
from server.engine.quantization.resolve import resolve_formats


def resolve_forms(
    requested: CpuWeights,
    checkpoint: Checkpoint,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str,
) -> tuple[list[CheckRow], WeightForms]:
    """The forms, and the line of the table; none on other devices, where nothing was asked for.

    Raises:
        UserError: see `choose_forms`.
    """
    formats = resolve_formats(checkpoint, config, keep_blocks=load_format != "dummy").by_module.values()
    headers = read_headers(checkpoint).values()
    need = ChoiceNeed(
        device=device,
        dtype=dtype,
        keeps_codes=any(isinstance(format, GgmlBlocks | Int4) for format in formats),
        plain_bytes=sum(prod(header.shape) for header in headers) * dtype.itemsize,
        most_packed_tokens=lambda: most_packed_tokens(config),
    )
    forms, why = choose_forms(requested, need)
    if device.type != "cpu":
        return [], forms
    resolved = "+".join(name for name, kept in (("packed", forms.packed), ("16bit", forms.plain)) if kept)
    if forms.plain and not forms.packed and dtype.itemsize != 2:
        resolved = "plain"
    return [Ask("target", "cpu_weights", SETTING, requested).row(resolved, why)], forms
