"""Which forms of the weights are kept on a CPU, decided with the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from server.engine.cpu.compiler import NoKernels
from server.engine.cpu.forms import PLAIN, WeightForms
from server.engine.cpu.library import load_library
from server.engine.kv.sizing import free_cpu_bytes
from server.errors import UserError

CpuWeights = Literal["auto", "packed", "16bit"]

SETTING = "--cpu-weights"
WIDEST_STEP = 1024
"""Where packed weights are quicker up to here, no other form is kept."""
SHARE_FOR_BOTH = 0.25
"""Of the free memory, which a second form of all weights may take."""


@dataclass(frozen=True)
class ChoiceNeed:
    """The model whose weights these are."""

    device: torch.device
    dtype: torch.dtype
    keeps_codes: bool
    """Whether any of its linear layers is stored in a way that the packed form keeps."""
    plain_bytes: int
    """Of all weights in the model's dtype."""
    most_packed_tokens: Callable[[], int]
    """Measures up to how many tokens a step is quicker with packed weights."""


def choose_forms(requested: CpuWeights, need: ChoiceNeed) -> tuple[WeightForms, str]:
    """The forms, and why.

    Raises:
        UserError: an explicit choice cannot be honoured.
    """
    problem = _problem(need)
    if requested == "16bit":
        if need.device.type != "cpu":
            raise UserError(
                f"{SETTING} 16bit: the model runs on {need.device.type}. Leave it out, or use --device cpu."
            )
        return PLAIN, "asked for"
    if problem is not None:
        if requested == "packed":
            raise UserError(f"{SETTING} packed: {problem}. Leave it out, or set it to auto.")
        return PLAIN, problem
    if requested == "packed":
        return WeightForms(packed=True, plain=False), "asked for"
    if not need.keeps_codes:
        return PLAIN, "no linear layer is stored in 4 or 8 bits in groups of 32 columns"
    if need.plain_bytes > SHARE_FOR_BOTH * free_cpu_bytes():
        return WeightForms(packed=True, plain=False), "the memory is too small for a second form"
    most = need.most_packed_tokens()
    if most >= WIDEST_STEP:
        return WeightForms(packed=True, plain=False), "measured: the packed products are quicker in steps of every size"
    return WeightForms(True, True, most), f"measured: packed up to {most} tokens a step, 16 bits beyond"


def _problem(need: ChoiceNeed) -> str | None:
    if need.device.type != "cpu":
        return f"the model runs on {need.device.type}"
    if need.dtype is not torch.bfloat16:
        return f"the model computes in {str(need.dtype).removeprefix('torch.')}; packed products take bfloat16"
    try:
        load_library()
    except NoKernels as reason:
        return str(reason)
    return None
