"""Which forms of the weights are kept on a CPU, decided with the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import torch

from server.engine.cpu.compiler import NoKernels
from server.engine.cpu.forms import PLAIN, WeightForms
from server.engine.cpu.library import load_library
from server.engine.cpu.weights import BLOCK, pack_four_bits
from server.engine.kv.sizing import free_cpu_bytes
from server.errors import UserError

CpuWeights = Literal["auto", "packed", "16bit"]

SETTING = "--cpu-weights"
WIDTHS = (16, 32, 64, 128, 256, 512)
"""Tokens of a step at which both forms are timed."""
MOST_TIMED = 4096
"""Rows and columns; larger weights behave alike."""
SHARE_FOR_BOTH = 0.25
"""Of the free memory, which a second form of all weights may take."""
_REPEATS = 5


@dataclass(frozen=True)
class ChoiceNeed:
    """The model whose weights these are."""

    device: torch.device
    dtype: torch.dtype
    keeps_codes: bool
    """Whether any of its linear layers is stored in a way that the packed form keeps."""
    hidden_size: int
    intermediate_size: int
    plain_bytes: int
    """Of all weights in the model's dtype."""


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
    most = most_packed_tokens(need.hidden_size, need.intermediate_size)
    if most >= WIDTHS[-1]:
        return WeightForms(packed=True, plain=False), "measured: the packed products are quicker at every width"
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


@torch.inference_mode()
def most_packed_tokens(hidden_size: int, intermediate_size: int) -> int:
    """Up to how many tokens a step the product of packed weights is the quicker one here; 0 if never."""
    columns = max(BLOCK, min(hidden_size, MOST_TIMED) // BLOCK * BLOCK)
    rows = min(2 * intermediate_size, MOST_TIMED)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scales = torch.full((rows, columns // BLOCK), 2.0**-7)
    packed = pack_four_bits(codes, scales, -8 * scales)
    plain = torch.ops.mkldnn._reorder_linear_weight(torch.randn(rows, columns).bfloat16(), 32)
    most = 0
    for width in WIDTHS:
        x = torch.randn(width, columns).bfloat16()
        ours = _seconds(lambda x=x: packed.product(x))  # type: ignore[misc]
        theirs = _seconds(
            lambda x=x: torch.ops.mkldnn._linear_pointwise.default(x, plain, None, "none", [], "")  # type: ignore[misc]
        )
        if ours > theirs:
            break
        most = width
    return most


def _seconds(work: Callable[[], object]) -> float:
    """The shortest of some runs: what others take from the cores only adds."""
    work()
    best = float("inf")
    for _ in range(_REPEATS):
        started = perf_counter()
        work()
        best = min(best, perf_counter() - started)
    return best
