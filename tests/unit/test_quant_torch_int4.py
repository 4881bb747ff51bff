"""The packed int4 experts against the reference, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from server.engine.moe.base import ExpertWeights, MoENeed, QuantizedExperts
from server.engine.moe.registry import MOE_BACKENDS, resolve_moe_backend
from server.engine.quantization.format import UNQUANTIZED, WeightFormat
from server.engine.quantization.fp8 import Fp8
from server.engine.quantization.int4 import Int4
from server.engine.quantization.nvfp4 import Nvfp4
from server.engine.quantization.quantize import quantize
from server.engine.quantization.stored import QuantizedTensors
from server.errors import UserError

CPU = torch.device("cpu")
EXPERTS, TOP_K, HIDDEN, WIDTH = 6, 2, 512, 256
torch.set_num_threads(1)


def need(weights: WeightFormat, dtype: torch.dtype = torch.float32, **sizes: int) -> MoENeed:
    hidden, width = sizes.get("hidden", HIDDEN), sizes.get("width", WIDTH)
    return MoENeed(torch.device("cpu"), dtype, EXPERTS, TOP_K, hidden, width, weights)


def experts(format: Int4, dtype: torch.dtype) -> QuantizedExperts:
    """Random ones whose gates, ups and downs all have their own scales, of the given dtype as in real files."""
    generator = torch.Generator().manual_seed(2)
    gate_up = QuantizedTensors.allocate(format, WIDTH, HIDDEN, CPU, (EXPERTS, 2))
    down = QuantizedTensors.allocate(format, HIDDEN, WIDTH, CPU, (EXPERTS,))
    weights = [gate_up[i, j] for i in range(EXPERTS) for j in range(2)] + [down[i] for i in range(EXPERTS)]
    for index, weight in enumerate(weights):
        plain = torch.randn(weight.rows, weight.columns, generator=generator) / 16 + index / 300
        for name, part in quantize(plain.to(dtype), format).items():
            weight.parts[name].copy_(part)
    return QuantizedExperts(gate_up, down)


def inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.rand(tokens, EXPERTS - 1, generator=generator).argsort(-1)[:, :TOP_K]  # the last gets none
    return (
        torch.randn(tokens, HIDDEN, generator=generator).to(dtype),
        ids,
        torch.rand(tokens, TOP_K, generator=generator),
    )


@pytest.mark.parametrize("tokens", [0, 1, 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "format", [Int4(32), Int4(64, False), Int4(128), Int4(256, False), Int4(None), Int4(None, False)], ids=str
)
def test_equals_the_reference(format: Int4, dtype: torch.dtype, tokens: int) -> None:
    held = experts(format, dtype)
    x, ids, scores = inputs(tokens, dtype)
    outputs = {}
    for name in ("torch", "torch_int4"):
        backend = MOE_BACKENDS[name](need(format, dtype))
        outputs[name] = backend.forward(x, backend.pack(held), ids, scores)
    assert outputs["torch_int4"].dtype is dtype
    if dtype is torch.float32:
        torch.testing.assert_close(outputs["torch_int4"], outputs["torch"], rtol=1e-4, atol=1e-5)
        return
    # Both against fp32 with the same weights: the packed product rounds no worse than the plain one.
    exact = MOE_BACKENDS["torch"](need(format))
    expected = exact.forward(x.float(), exact.pack(held), ids, scores)
    errors = {name: float((out.float() - expected).norm()) for name, out in outputs.items()}
    assert errors["torch_int4"] <= 1.5 * errors["torch"] + 1e-6


def test_memory_is_that_of_4_bits() -> None:
    held = experts(Int4(128), torch.bfloat16)
    packed = MOE_BACKENDS["torch_int4"](need(Int4(128), torch.bfloat16)).pack(held)
    parts = [part for expert in packed for part in (expert.gate_up, expert.down)]
    nbytes = sum(part.codes.nbytes + part.scales_and_zeros.nbytes for part in parts)
    assert nbytes * 8 == EXPERTS * 3 * HIDDEN * WIDTH * (4 + 2 * 16 / 128)


REFUSED = [
    (need(UNQUANTIZED), r"unquantised experts \(it takes 4-bit integer ones only, int4\)"),
    (need(Fp8("block")), "experts stored as fp8_block"),
    (need(Nvfp4("modelopt")), "experts stored as nvfp4"),
    (need(Int4(16)), "groups of 16 columns"),
    (need(Int4(96)), "hidden size 512 in groups of 96 columns"),
    (need(Int4(None), hidden=520), "hidden size 520"),
    (need(Int4(32), width=48), "expert width 48"),
    (need(Int4(32), torch.float64), r"dtype torch\.float64"),
    (MoENeed(torch.device("cuda"), torch.bfloat16, 4, 2, 64, 64, Int4(32)), "device cuda"),
]


@pytest.mark.parametrize(("refused", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refusals(refused: MoENeed, reason: str) -> None:
    with pytest.raises(UserError, match=rf"^--moe-backend: 'torch_int4' .*{reason}"):
        resolve_moe_backend("torch_int4", refused)


def test_the_choice_for_each_format() -> None:
    names = {str(w): resolve_moe_backend(None, need(w)).name for w in (UNQUANTIZED, Int4(32), Int4(16), Fp8("block"))}
    assert list(names.values()) == ["grouped_mm", "torch_int4", "torch", "torch"]
    resolution = resolve_moe_backend(None, need(Fp8("block")))
    assert [name for name, _ in resolution.rejected][:2] == ["grouped_mm", "torch_int4"]
    with pytest.raises(
        UserError, match=r"'grouped_mm' .*experts stored as int4_g32 .*would work: auto, torch_int4, torch"
    ):
        resolve_moe_backend("grouped_mm", need(Int4(32)))


def test_experts_that_were_not_planned() -> None:
    plain = ExpertWeights(torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN), torch.zeros(EXPERTS, HIDDEN, WIDTH))
    with pytest.raises(TypeError, match="torch_int4 cannot compute unquantised experts"):
        MOE_BACKENDS["torch_int4"](need(Int4(32))).pack(plain)
    with pytest.raises(TypeError, match="grouped_mm cannot compute int4_g32 experts"):
        MOE_BACKENDS["grouped_mm"](need(UNQUANTIZED)).pack(experts(Int4(32), torch.float32))
