"""Where the Triton attention backend can run, and that nothing imports triton before it is asked."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from server.engine.attention.base import AttentionNeed, Unsupported
from server.engine.attention.registry import ATTENTION_BACKENDS, PREFERENCE, resolve_attention_backend
from server.engine.attention.triton import TritonAttention
from server.errors import UserError

FP32 = torch.float32
VERDICT = """
import torch
from server.engine.attention.base import AttentionNeed
from server.engine.attention.triton import TritonAttention
print(TritonAttention.supports(AttentionNeed(torch.device("cpu"), torch.float32, torch.float32, 4, 2, 16)))
"""


def _need(
    device: str = "cuda",
    dtype: torch.dtype = FP32,
    kv_dtype: torch.dtype = FP32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
) -> AttentionNeed:
    return AttentionNeed(torch.device(device), dtype, kv_dtype, heads, kv_heads, head_dim)


def _python(code: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (_need(heads=5), "5 query heads are no multiple of 2 KV heads"),
        (_need(head_dim=320), r"head dimension 320 \(it takes up to 256\)"),
        (_need(dtype=torch.float64), "queries of dtype torch.float64"),
        (_need(kv_dtype=torch.float64), "KV cache of dtype torch.float64"),
        (_need(device="meta"), "the triton backend needs CUDA, or TRITON_INTERPRET=1 for tests on a CPU"),
    ],
)
def test_what_it_refuses(need: AttentionNeed, reason: str) -> None:
    with pytest.raises(UserError, match=f"'triton' cannot serve this model: {reason}"):
        resolve_attention_backend("triton", need)


@pytest.mark.parametrize("name", ["triton", "TRITON_ATTN", "auto"])
def test_cuda_prefers_it(name: str) -> None:
    assert resolve_attention_backend(name, _need("cuda")).name == "triton"


def test_the_cpu_prefers_torch() -> None:
    assert resolve_attention_backend("auto", _need("cpu")).name == "torch"


def test_every_backend_has_a_place_on_every_device() -> None:
    assert all(set(order) == set(ATTENTION_BACKENDS) for order in PREFERENCE.values())


def test_a_plain_cpu_is_refused_without_importing_triton() -> None:
    out = _python(f"{VERDICT}\nimport sys, server.engine.attention.registry\nprint('triton' in sys.modules)")
    reason = "the triton backend needs CUDA, or TRITON_INTERPRET=1 for tests on a CPU"
    assert out == f"{Unsupported(reason)}\nFalse"


@pytest.mark.skipif(not os.environ.get("TRITON_INTERPRET"), reason="kernels are compiled here")
def test_the_interpreter_serves_a_cpu() -> None:
    assert TritonAttention.supports(_need("cpu")) is None


def test_a_switch_that_comes_too_late_is_refused() -> None:
    out = _python(f"import os, triton\nos.environ['TRITON_INTERPRET'] = '1'\n{VERDICT}")
    assert "set before anything imports triton" in out


def test_a_broken_triton_is_a_reason() -> None:
    out = _python(f"import sys\nsys.modules['triton'] = None\n{VERDICT}", TRITON_INTERPRET="1")
    assert "triton does not import here" in out


def test_pages_and_layout() -> None:
    pages = TritonAttention.kernel_pages
    assert [size for size in range(1, 300) if pages.accepts(size)] == [16, 32, 64, 128]
    assert {backend.kv_layout for backend in ATTENTION_BACKENDS.values()} == {"NHD"}
