"""Linear layers over 8- and 4-bit weights, in triton's interpreter, against the dequantised product in fp64."""

from __future__ import annotations

import os
import secrets

import pytest
import torch
from attention_batches import memory_full_of_nan
from moe_cases import FORMATS
from torch import Tensor

from server.engine.kernels.packed_linear import MOST_VECTOR_ROWS, pack, packed_linear, unpackable_linear
from server.engine.quantization.format import QuantizedFormat, Unquantized
from server.engine.quantization.fp8 import Fp8
from server.engine.quantization.int4 import Int4
from server.engine.quantization.quantize import quantize
from server.engine.quantization.stored import QuantizedTensors

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"),
    reason="kernels are compiled here: tests/gpu compares them (or set TRITON_INTERPRET=1)",
)
CPU = torch.device("cpu")
QUANTIZED = [format for format in FORMATS if not isinstance(format, Unquantized)]


def shards_of(format: QuantizedFormat, rows: tuple[int, ...], columns: int, seed: int) -> list[QuantizedTensors]:
    """Random weights of different sizes, so that a scale taken from another shard shows."""
    random = torch.Generator().manual_seed(seed)
    shards = []
    for place, count in enumerate(rows):
        weight = torch.randn(count, columns, generator=random) * columns**-0.5 * (place + 1)
        stored = QuantizedTensors.allocate(format, count, columns, CPU)
        for name, part in quantize(weight, format).items():
            stored.parts[name].copy_(part)
        shards.append(stored)
    return shards


def expected(x: Tensor, shards: list[QuantizedTensors], bias: Tensor | None) -> Tensor:
    whole = torch.cat([shard.dequantize(torch.float32) for shard in shards])
    product = x.double() @ whole.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("rows", [1, 3, 21])
@pytest.mark.parametrize("format", QUANTIZED, ids=lambda format: f"{format.label}-{getattr(format, 'layout', '')}")
def test_agrees_with_the_dequantised_product(format: QuantizedFormat, rows: int) -> None:
    seed = secrets.randbits(32)
    block = format.block[0] if isinstance(format, Fp8) and format.granularity == "block" else 16
    shards = shards_of(format, (block, 2 * block, 40), 160, seed)
    assert unpackable_linear(shards, CPU) is None
    random = torch.Generator().manual_seed(seed + 1)
    bias = torch.randn(3 * block + 40, generator=random) if rows > 1 else None
    x = torch.randn(rows, 200, generator=random)[:, :160]
    with memory_full_of_nan(CPU):
        got = packed_linear(x, pack(shards, torch.float32), bias)
    want = expected(x, shards, bias)
    torch.testing.assert_close(got.double(), want, atol=2e-5 * float(want.abs().max()), rtol=1e-4)


def test_half_precision_on_both_sides_of_the_switch_to_tensor_cores() -> None:
    shards = shards_of(Int4(32), (48,), 64, 3)
    x = torch.randn(MOST_VECTOR_ROWS + 1, 64, generator=torch.Generator().manual_seed(4)).half()
    weight = pack(shards, torch.float16)
    for rows in (0, MOST_VECTOR_ROWS, MOST_VECTOR_ROWS + 1):
        got = packed_linear(x[:rows], weight)
        assert got.dtype is torch.float16
        torch.testing.assert_close(got.double(), expected(x[:rows], shards, None), atol=0.01, rtol=0.01)


def test_what_the_kernels_leave_to_dequantising() -> None:
    block = Fp8("block", "weight_scale_inv")
    assert "a shard of 96 rows in blocks of 128" in str(unpackable_linear(shards_of(block, (96, 128), 128, 0), CPU))
    assert "input width 48" in str(unpackable_linear(shards_of(Int4(16), (32,), 48, 0), CPU))
