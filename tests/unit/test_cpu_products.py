"""The C products against float64 products of the numbers that the codes stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from server.engine.cpu.compiler import NoKernels, compiled_library
from server.engine.cpu.weights import PackedWeight, pack_eight_bits, pack_four_bits, pack_sixteen_bits

pytestmark = pytest.mark.usefixtures("cpu_kernels")

BLOCK = 32


def drawn(bits: int, rows: int, columns: int, bias: Tensor | None) -> tuple[PackedWeight, Tensor]:
    """A packed weight, and what it stands for in float64."""
    scales = (torch.rand(rows, columns // BLOCK) * 0.02 + 1e-3).half()
    wide = scales.double().repeat_interleave(BLOCK, 1)
    if bits == 4:
        codes, minimums = torch.randint(0, 16, (rows, columns), dtype=torch.uint8), -8.5 * scales
        numbers = codes * wide + minimums.double().repeat_interleave(BLOCK, 1)
        return pack_four_bits(codes, scales, minimums, bias), numbers
    if bits == 8:
        codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
        return pack_eight_bits(codes, scales, bias), codes * wide
    weight = torch.randn(rows, columns).bfloat16()
    return pack_sixteen_bits(weight, bias), weight.double()


def as_multiplied(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The activations in float64, and how far each may be rounded: a step of its block's scale of 16 bits."""
    numbers = x.double()
    if bits == 16:
        return numbers, torch.zeros_like(numbers)
    blocks = numbers.view(len(x), -1, BLOCK)
    step = blocks.abs().amax(-1, keepdim=True) / (127 * 256)
    return numbers, (step * 1.0001).expand_as(blocks).reshape(numbers.shape)


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([4, 8, 16]),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 5),
    tokens=st.integers(1, 19),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_products_are_those_of_the_stored_numbers(
    bits: int, rows: int, blocks: int, tokens: int, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    bias = torch.randn(rows) if biased else None
    packed, numbers = drawn(bits, rows, blocks * BLOCK, bias)
    x = torch.randn(tokens, blocks * BLOCK).bfloat16() * 10 ** float(torch.empty(()).uniform_(-3, 3))
    exact, rounding = as_multiplied(x, bits)
    wanted = exact @ numbers.T + (0 if bias is None else bias.double())
    allowed = rounding @ numbers.abs().T + 3e-6 * (exact.abs() @ numbers.abs().T) + 1e-6
    got = packed.product(x, torch.float32)
    assert bool(((got.double() - wanted).abs() <= allowed).all())
    assert torch.equal(packed.product(x), got.bfloat16())


@settings(max_examples=20, deadline=None)
@given(bits=st.sampled_from([4, 8, 16]), tokens=st.integers(1, 19), limit=st.integers(1, 100), seed=st.integers(0, 99))
def test_best_is_the_argmax_of_the_product(bits: int, tokens: int, limit: int, seed: int) -> None:
    torch.manual_seed(seed)
    packed, _ = drawn(bits, 100, 64, None)
    x = torch.randn(tokens, 64).bfloat16()
    assert packed.best(x, limit).tolist() == packed.product(x, torch.float32)[:, :limit].argmax(-1).tolist()


def test_best_takes_the_first_of_equals() -> None:
    packed = pack_sixteen_bits(torch.ones(200, 32).bfloat16())
    assert packed.best(torch.ones(3, 32).bfloat16(), 200).tolist() == [0, 0, 0]


def test_rows_may_be_apart_and_extreme() -> None:
    torch.manual_seed(1)
    packed, numbers = drawn(8, 40, 64, None)
    wide = torch.randn(5, 128).bfloat16()
    torch.testing.assert_close(packed.product(wide[:, 64:]), packed.product(wide[:, 64:].contiguous()))
    assert torch.equal(packed.product(torch.zeros(2, 64).bfloat16()), torch.zeros(2, 40).bfloat16())
    # The largest code times the largest activation: sums of 16 bits would overflow.
    codes = torch.full((16, 64), -128, dtype=torch.int8)
    extreme = pack_eight_bits(codes, torch.ones(16, 2)).product(torch.ones(1, 64).bfloat16(), torch.float32)
    torch.testing.assert_close(extreme, torch.full((1, 16), -128.0 * 64))
    del numbers


def test_another_dtype_is_refused() -> None:
    packed, _ = drawn(4, 16, 32, None)
    with pytest.raises(TypeError, match="float32"):
        packed.product(torch.ones(1, 32))


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NoKernels, match="no C compiler"):
        compiled_library(tmp_path)
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho nothing works >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))
    with pytest.raises(NoKernels, match="nothing works"):
        compiled_library(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
