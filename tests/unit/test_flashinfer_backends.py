"""The adapters of FlashInfer, without a GPU: what they hand over, to a stand-in that does what its documents say."""

from __future__ import annotations

import inspect
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attention_batches import LAYER, LAYERS, MIXED, Geometry, assert_attention, make_case
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from server.engine.attention import flashinfer as adapter
from server.engine.attention.base import AttentionNeed, Unsupported
from server.engine.attention.flashinfer import FlashInferAttention, page_lists
from server.engine.moe import flashinfer_cutlass as moe_adapter
from server.engine.moe.base import ExpertWeights, MoENeed
from server.engine.moe.flashinfer_cutlass import FlashInferCutlassMoE
from server.engine.moe.torch import TorchMoE

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 200)), min_size=1, max_size=6), st.sampled_from([16, 32, 64])
)
def test_page_lists_name_every_rows_pages(rows: list[tuple[int, int]], page_size: int) -> None:
    lens = [new + past for new, past in rows]
    starts = [0]
    for new, _ in rows:
        starts.append(starts[-1] + new)
    width = max(lens) // page_size + 3
    table = torch.arange(len(rows) * width)
    lists = page_lists(starts, lens, width, page_size)
    assert lists.decodes == all(new == 1 for new, _ in rows)
    assert lists.query_start.tolist() == starts
    for row, length in enumerate(lens):
        own = table[lists.places][int(lists.page_start[row]) : int(lists.page_start[row + 1])]
        last = int(lists.last_page_len[row])
        assert own.tolist() == [row * width + i for i in range(len(own))]
        assert (len(own) - 1) * page_size + last == length
        assert 1 <= last <= page_size


class Wrapper:
    """Attention as the package documents its paged wrappers: causal from the rows' ends, in "NHD" pages."""

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD" and options["backend"] == "fa2" and workspace.dtype is torch.uint8
        self.plans: list[tuple[Any, ...]] = []

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        start, page_start, indices, last, heads, kv_heads, head_dim, page_size, options = self.plans[-1]
        assert indices.dtype is torch.int32 and q.is_contiguous()
        assert options["sm_scale"] == 1 / math.sqrt(head_dim)
        out = torch.empty_like(q)
        for row in range(len(last)):
            own = indices[int(page_start[row]) : int(page_start[row + 1])].long()
            length = (len(own) - 1) * page_size + int(last[row])
            keys, values = (
                cache[own].flatten(0, 1)[:length].repeat_interleave(heads // kv_heads, 1) for cache in pages
            )
            new = slice(int(start[row]), int(start[row + 1]))
            count = new.stop - new.start
            scores = torch.einsum("qhd,khd->hqk", q[new], keys) * options["sm_scale"]
            seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
            out[new] = torch.einsum("hqk,khd->qhd", weights, values)
        return out


class DecodeWrapper(Wrapper):
    def plan(self, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **options: Any) -> None:
        assert "causal" not in options
        self.plans.append((torch.arange(len(last) + 1), indptr, indices, last, *shape, options))


class PrefillWrapper(Wrapper):
    def plan(self, start: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **options: Any) -> None:
        assert options["causal"] is True
        self.plans.append((start, indptr, indices, last, *shape, options))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("flashinfer")
    stand_in.BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper  # type: ignore[attr-defined]
    stand_in.BatchPrefillWithPagedKVCacheWrapper = PrefillWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    event = SimpleNamespace(synchronize=lambda: None, record=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("rows", [MIXED, ((40, 1), (60, 1), (15, 1))], ids=["mixed", "decodes"])
def test_what_is_planned_and_stored_is_the_steps(rows: tuple[tuple[int, int], ...]) -> None:
    geometry = Geometry(heads=4, kv_heads=2, head_dim=64, block_size=32, page_size=32)
    case = make_case(geometry, rows, seed=9)
    backend = FlashInferAttention(geometry.need(CPU, torch.float32), LAYERS)
    backend.allocate(case.num_pages, geometry.page_size)
    assert backend.cache is not None
    for slots, k, v in case.pasts:
        backend.cache.store(LAYER, k, v, slots)
    plan = backend.plan(case.step)
    assert_attention(backend.forward(case.q, case.k, case.v, LAYER, plan), case.expected())


@pytest.mark.usefixtures("package")
def test_without_a_cache_a_step_is_its_own_context() -> None:
    geometry = Geometry(heads=4, kv_heads=2, head_dim=64)
    case = make_case(geometry, ((0, 5), (0, 20)), seed=10)
    backend = FlashInferAttention(geometry.need(CPU, torch.float32), LAYERS)
    assert_attention(backend.forward(case.q, case.k, case.v, LAYER, backend.plan(case.step)), case.expected())


def need(**changes: Any) -> AttentionNeed:
    values = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": CUDA} | changes
    return AttentionNeed(kv_dtype=values.pop("kv_dtype", values["dtype"]), **values)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": CPU}, "needs CUDA"),
        ({"head_dim": 80}, "head dimension 80"),
        ({"num_heads": 40}, "5 query heads a KV head"),
        ({"dtype": torch.float32}, "queries of dtype torch.float32"),
        ({"kv_dtype": torch.float16}, "KV cache of dtype torch.float16"),
    ],
)
def test_what_attention_refuses(changes: dict[str, Any], reason: str) -> None:
    verdict = FlashInferAttention.supports(need(**changes))
    assert isinstance(verdict, Unsupported) and reason in verdict.reason


def test_it_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(moe_adapter.importlib.util, "find_spec", lambda name: None)
    for verdict in (FlashInferAttention.supports(need()), FlashInferCutlassMoE.supports(moe_need())):
        assert verdict is not None and "flashinfer-python is not installed" in verdict.reason


def moe_need(device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16) -> MoENeed:
    return MoENeed(device, dtype, 6, 2, 32, 16)


def test_experts_offer_themselves_only_where_their_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = SimpleNamespace(is_compiled=False)
    jit = SimpleNamespace(gen_cutlass_fused_moe_sm90_module=lambda: compiled)
    monkeypatch.setattr(moe_adapter.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(moe_adapter.importlib, "import_module", lambda name: jit)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    verdict = FlashInferCutlassMoE.supports(moe_need())
    assert verdict is not None and "not compiled here" in verdict.reason
    compiled.is_compiled = True
    assert FlashInferCutlassMoE.supports(moe_need()) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    verdict = FlashInferCutlassMoE.supports(moe_need())
    assert verdict is not None and "8.6" in verdict.reason


def test_experts_are_handed_over_with_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(
        x: Tensor, ids: Tensor, scales: Tensor, fc1: Tensor, fc2: Tensor, dtype: torch.dtype, **options: Any
    ) -> None:
        assert ids.dtype is torch.int32 and scales.dtype is torch.float32
        assert options["use_fused_finalize"] is False and options["quant_scales"] == []
        total = torch.zeros_like(x)
        for token in range(len(x)):
            for slot in range(ids.shape[1]):
                up, gate = (fc1[int(ids[token, slot])] @ x[token]).chunk(2)
                hidden = torch.nn.functional.silu(gate) * up
                total[token] += scales[token, slot] * (fc2[int(ids[token, slot])] @ hidden)
        options["output"].copy_(total)

    monkeypatch.setattr(moe_adapter.importlib, "import_module", lambda name: SimpleNamespace(cutlass_fused_moe=fused))
    plain = moe_need(CPU, torch.float32)
    random = torch.Generator().manual_seed(1)
    experts = ExpertWeights(torch.randn(6, 32, 32, generator=random), torch.randn(6, 32, 16, generator=random))
    x, weights = torch.randn(5, 32, generator=random), torch.rand(5, 2, generator=random)
    ids = torch.stack([torch.randperm(6, generator=random)[:2] for _ in range(5)])
    reference = TorchMoE(plain)
    want = reference.forward(x, reference.pack(experts), ids, weights)
    backend = FlashInferCutlassMoE(plain)
    torch.testing.assert_close(backend.forward(x, backend.pack(experts), ids, weights), want, atol=1e-4, rtol=1e-4)


def test_the_real_package_takes_these_arguments() -> None:
    package = pytest.importorskip("flashinfer")
    nothing = torch.empty(0)
    inspect.signature(package.BatchPrefillWithPagedKVCacheWrapper.plan).bind(
        None, *[nothing] * 4, 8, 2, 64, 16, causal=True, q_data_type=None, kv_data_type=None, sm_scale=1.0
    )
    inspect.signature(package.BatchDecodeWithPagedKVCacheWrapper.__init__).bind(
        None, nothing, "NHD", use_tensor_cores=True, backend="fa2"
    )
    inspect.signature(package.fused_moe.cutlass_fused_moe).bind(
        *[nothing] * 5, torch.bfloat16, quant_scales=[], output=nothing, use_fused_finalize=False
    )
