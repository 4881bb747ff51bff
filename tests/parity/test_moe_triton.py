"""Both Triton MoE backends in triton's interpreter, against the reference over the same dequantised experts."""

from __future__ import annotations

import dataclasses
import os
import secrets

import pytest
import torch
from attention_batches import memory_full_of_nan
from moe_cases import EXPERTS, FORMATS, HIDDEN, TOP_K, WIDTH, expected, make_experts, random_inputs

from server.engine.kernels import experts as kernels
from server.engine.kernels.choose_experts import softmax_topk
from server.engine.moe.base import ExpertWeights, MoENeed
from server.engine.moe.registry import MOE_BACKENDS, resolve_moe_backend
from server.engine.moe.triton import TritonMoE
from server.engine.moe.triton_w4a16 import TritonW4A16MoE
from server.engine.quantization.format import UNQUANTIZED, WeightFormat
from server.engine.quantization.fp8 import Fp8
from server.engine.quantization.int4 import Int4
from server.engine.quantization.nvfp4 import Nvfp4

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"),
    reason="kernels are compiled here: tests/gpu compares them (or set TRITON_INTERPRET=1)",
)
CPU = torch.device("cpu")
CUTS = kernels.Cut(16, 64, 32, 4, 1), kernels.Cut(16, 32, 32, 4, 1)
"""Few programs, since the interpreter takes milliseconds for each; pieces that end within a row."""
NEED = MoENeed(CPU, torch.float32, EXPERTS, TOP_K, HIDDEN, WIDTH)


@pytest.fixture
def seed() -> int:
    """Fresh inputs in every run; a failure shows the number."""
    return secrets.randbits(32)


@pytest.mark.parametrize("way", ["pairs", "groups"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.label}-{getattr(format, 'layout', '')}")
def test_agrees_with_the_reference(format: WeightFormat, way: str, seed: int) -> None:
    need = dataclasses.replace(NEED, weights=format)
    backend = MOE_BACKENDS["triton_w4a16" if format.family in ("int4", "nvfp4") else "triton"]
    assert backend.supports(need) is None
    experts = make_experts(format, torch.float32, CPU, seed)
    packed = backend(need).pack(experts)
    x, ids, weights = random_inputs(3, torch.float32, CPU, seed)
    with memory_full_of_nan(CPU):
        if way == "pairs":
            got = kernels.by_pairs(x, packed, ids, weights, CUTS)
        else:
            got = kernels.by_groups(x, packed, ids, weights, CUTS)
    want = expected(x, experts, ids, weights)
    torch.testing.assert_close(got.double(), want, atol=2e-5 * float(want.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_half_precision_of_any_number_of_tokens(tokens: int, seed: int) -> None:
    need = dataclasses.replace(NEED, dtype=torch.float16)
    experts = make_experts(UNQUANTIZED, torch.float16, CPU, seed)
    backend = TritonMoE(need)
    x, ids, weights = random_inputs(tokens, torch.float16, CPU, seed)
    got = backend.forward(x, backend.pack(experts), ids, weights)
    assert got.dtype is torch.float16
    torch.testing.assert_close(got.double(), expected(x, experts, ids, weights), atol=0.01, rtol=0.01)


def test_pairs_are_sorted_by_expert_and_in_order_within_one(seed: int) -> None:
    ids = torch.randint(0, 7, (700, 2), generator=torch.Generator().manual_seed(seed))
    pairs, starts = kernels.sort_pairs(ids, 9)
    want, order = ids.flatten().sort(stable=True)
    assert torch.equal(pairs.long(), order)
    assert starts.tolist() == [int((want < expert).sum()) for expert in range(10)]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 6), (5, 5)])
def test_softmax_router(experts: int, top_k: int, renormalize: bool, seed: int) -> None:
    logits = torch.randn(6, experts, generator=torch.Generator().manual_seed(seed))
    ids, weights = softmax_topk(logits, top_k, renormalize)
    want, want_ids = logits.softmax(-1).topk(top_k)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want / want.sum(-1, keepdim=True) if renormalize else want)


@pytest.mark.parametrize(
    ("backend", "need", "reason"),
    [
        (TritonMoE, {"weights": Int4(32)}, "experts stored as int4_g32"),
        (TritonMoE, {"dtype": torch.float64}, "dtype torch.float64"),
        (TritonMoE, {"weights": Fp8("block", block=(48, 128))}, r"blocks of 48 x 128 \(multiples of 32 each\)"),
        (TritonW4A16MoE, {}, r"unquantised experts \(it takes 4-bit ones only, nvfp4 and int4\)"),
        (TritonW4A16MoE, {"weights": Fp8("tensor")}, "experts stored as fp8_tensor"),
        (TritonW4A16MoE, {"weights": Nvfp4("modelopt"), "intermediate_size": 48}, "expert width 48 with 4-bit weights"),
        (TritonW4A16MoE, {"weights": Int4(64), "hidden_size": 96}, "hidden size 96 in groups of 64 columns"),
    ],
)
def test_what_they_refuse(backend: type[TritonMoE], need: dict[str, object], reason: str) -> None:
    from server.errors import UserError

    with pytest.raises(UserError, match=f"cannot serve this model: {reason}"):
        resolve_moe_backend(backend.name, dataclasses.replace(NEED, **need))


def test_experts_of_another_kind_than_planned() -> None:
    plain = ExpertWeights(torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN), torch.zeros(EXPERTS, HIDDEN, WIDTH))
    with pytest.raises(TypeError):
        TritonW4A16MoE(dataclasses.replace(NEED, weights=Int4(32))).pack(plain)
    with pytest.raises(TypeError):
        TritonMoE(dataclasses.replace(NEED, weights=Fp8("tensor"))).pack(plain)
