"""Linear layers of few rows, in triton's interpreter, against fp64."""

from __future__ import annotations

import os
import secrets

import pytest
import torch
import torch.nn.functional as F
from attention_batches import memory_full_of_nan

from server.engine.kernels.linear import few_rows
from server.engine.kernels.matvec import Shape, counters_for, tiles, vectors

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"),
    reason="kernels are compiled here: tests/gpu compares them (or set TRITON_INTERPRET=1)",
)
CPU = torch.device("cpu")


@pytest.fixture
def random() -> torch.Generator:
    """Fresh inputs in every run."""
    return torch.Generator().manual_seed(secrets.randbits(32))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize(("rows", "kernel"), [(1, vectors), (2, vectors), (3, vectors), (4, vectors), (19, tiles)])
def test_products(rows: int, kernel: object, bias: bool, random: torch.Generator) -> None:
    x, weight = torch.randn(rows, 200, generator=random)[:, :144], torch.randn(44, 144, generator=random)
    shift = torch.randn(44, generator=random) if bias else None
    assert kernel in (vectors, tiles)
    with memory_full_of_nan(CPU):
        got = kernel(x, weight, shift, Shape(16, 64, 4))
    want = F.linear(x.double(), weight.double(), None if shift is None else shift.double())
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("shares", [2, 3, 5])
def test_inputs_shared_out(shares: int, random: torch.Generator) -> None:
    x, weight, bias = (torch.randn(*shape, generator=random) for shape in ((5, 300), (44, 300), (44,)))
    counters = torch.zeros(counters_for(44), dtype=torch.int32)
    with memory_full_of_nan(CPU):
        got = [tiles(x, weight, bias, Shape(16, 64, 4, 1, shares), counters) for _ in range(2)]
    want = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(got[0].double(), want, atol=1e-4, rtol=1e-5)
    assert torch.equal(*got) and not counters.any()


@pytest.mark.parametrize(("rows", "kernel"), [(1, vectors), (3, vectors), (3, tiles), (20, tiles)])
def test_gated(rows: int, kernel: object, random: torch.Generator) -> None:
    x, weight = torch.randn(rows, 144, generator=random), torch.randn(44, 144, generator=random) / 8
    assert kernel in (vectors, tiles)
    with memory_full_of_nan(CPU):
        got = kernel(x, weight, None, Shape(16, 64, 4), gated=True)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    torch.testing.assert_close(got.double(), F.silu(gate) * up, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 5, 33])
def test_half_precision_by_the_table(rows: int, random: torch.Generator) -> None:
    x, weight = torch.randn(rows, 96, generator=random).half(), torch.randn(24, 96, generator=random).half() / 10
    got = few_rows(x, weight, None, None)
    assert got is not None and got.dtype is torch.float16
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, atol=2e-3, rtol=2e-3)


def test_what_is_left_to_torch() -> None:
    x, weight = torch.zeros(1, 64).half(), torch.zeros(8, 64).half()
    assert few_rows(x.expand(65, 64), weight, None, None) is None
    assert few_rows(x.float(), weight.float(), None, None) is None
    assert few_rows(x[:0], weight, None, None) is None
    assert few_rows(torch.zeros(64, 1).half().T, weight, None, None) is not None
    assert few_rows(x, torch.zeros(64, 8).half().T, None, None) is None
