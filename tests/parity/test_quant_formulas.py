"""Every format against its description, written out apart from the product, and against compressed-tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_reference import reference
from torch import Tensor

from server.engine.quantization.format import QuantizedFormat
from server.engine.quantization.fp8 import Fp8
from server.engine.quantization.int4 import Int4, pack, unpack
from server.engine.quantization.nvfp4 import Nvfp4
from server.engine.quantization.quantize import quantize
from server.engine.quantization.schemes import LAYOUTS, scheme_format
from server.engine.quantization.stored import QuantizedTensors
from server.errors import UserError

LABELS = [
    *("fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"),
    *("int4_g32", "int4_g128", "int4_channel", "int4_g32_asym", "int4_channel_asym", "int4_g3"),
]
CPU = torch.device("cpu")
torch.set_num_threads(1)


def formats() -> list[QuantizedFormat]:
    found: list[QuantizedFormat] = [Fp8("block", block=(16, 32)), Fp8("tensor", scale_dims=2), Nvfp4("modelopt", 1)]
    for layout in LAYOUTS:
        for label in LABELS:
            try:
                found.append(scheme_format(label, layout))
            except UserError:
                continue
    return found


FORMATS = formats()


def random_tensors(format: QuantizedFormat, rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    """Every code that the format has, and scales of both small and large size."""
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, Tensor] = {}
    for name, spec in format.tensors(rows, columns).items():
        if spec.expected is not None:
            parts[name] = torch.tensor(spec.expected)
        elif spec.dtype is torch.int32:
            parts[name] = torch.randint(-(1 << 31), (1 << 31) - 1, spec.shape, dtype=torch.int32, generator=generator)
        elif spec.dtype is torch.float32:
            parts[name] = torch.rand(spec.shape, generator=generator) * 3 + 0.01
        else:
            codes = torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=generator)
            if spec.dtype is torch.float8_e4m3fn:
                codes = torch.where(codes & 0x7F == 0x7F, 0, codes)  # NaN
            parts[name] = codes.view(spec.dtype)
    return parts


def expected(format: QuantizedFormat, parts: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    group = format.group_size if isinstance(format, Int4) else None
    block = format.block if isinstance(format, Fp8) else (128, 128)
    return reference(parts, rows, columns, group, block)


@pytest.mark.parametrize("format", FORMATS, ids=repr)
@given(rows=st.integers(1, 140), columns=st.integers(1, 140), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None)
def test_formula(format: QuantizedFormat, rows: int, columns: int, seed: int) -> None:
    parts = random_tensors(format, rows, columns, seed)
    got = format.dequantize(parts, columns)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), expected(format, parts, rows, columns), rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_a_stack_is_its_weights(format: QuantizedFormat) -> None:
    stack = QuantizedTensors.allocate(format, 20, 70, CPU, (3, 2))
    weights = {}
    for i in range(3):
        for j in range(2):
            parts = random_tensors(format, 20, 70, 10 * i + j)
            for name, target in stack[i, j].targets("m").items():
                target.copy_(parts[name.removeprefix("m.")])
            weights[i, j] = format.dequantize(parts, 70)
    assert stack.num_weights == 3 * 2 * 20 * 70
    whole = stack.dequantize(torch.float32)
    for (i, j), weight in weights.items():
        assert torch.equal(whole[i, j], weight)
        assert torch.equal(stack[i, j].dequantize(torch.bfloat16), weight.bfloat16())
    stack.check("m")


@pytest.mark.parametrize("format", FORMATS, ids=repr)
@pytest.mark.parametrize("kind", ["normal", "zero", "one row far away"])
def test_rounding_to_nearest(format: QuantizedFormat, kind: str) -> None:
    """What comes back is off by at most half a step of the format."""
    weight = torch.randn(40, 75, generator=torch.Generator().manual_seed(3)) * (0 if kind == "zero" else 1)
    if kind == "one row far away":
        weight[7] *= 100
    parts = quantize(weight, format)
    specs = format.tensors(40, 75)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {n: spec.shape for n, spec in specs.items()}
    got = format.dequantize(parts, 75)
    assert bool(got.isfinite().all())
    # Relative to the largest number that shares a scale: e4m3 keeps 3 bits of mantissa, e2m1 one and steps up to 2 / 6.
    step = {"fp8": 1 / 16, "int4": 0.15, "nvfp4": 0.2}[format.family]
    largest = weight.abs().amax(-1, keepdim=True) if "tensor" not in format.label else weight.abs().amax()
    if "block" in format.label:
        largest = weight.abs().amax()
    assert bool(((got - weight).abs() <= step * largest + 1e-9).all())
    if kind == "zero":
        assert not bool(got.any())


@given(st.lists(st.integers(0, 15), min_size=1, max_size=40))
def test_pack(codes: list[int]) -> None:
    words = pack(torch.tensor(codes))
    assert words.dtype is torch.int32
    assert len(words) == -(-len(codes) // 8)
    assert unpack(words)[: len(codes)].tolist() == codes


CT_ARGS = {
    "fp8_tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8_channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8_block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "int4_g32": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "int4_channel": {"num_bits": 4, "strategy": "channel"},
    "int4_g32_asym": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}


@pytest.mark.parametrize("label", CT_ARGS)
def test_against_compressed_tensors(label: str) -> None:
    """The library, where it is installed: it reads what the writer makes, and makes what the formula reads."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import (
        FloatQuantizationCompressor,
        NVFP4PackedCompressor,
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    format = scheme_format(label, "compressed-tensors")
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    compressor = {"fp8": FloatQuantizationCompressor, "int4": PackedQuantizationCompressor}.get(
        format.family, NVFP4PackedCompressor
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**CT_ARGS[label]))
    parts = quantize(weight, format)
    theirs = compressor.decompress(parts, scheme)["weight"].float()
    tolerance = 2**-8 if label == "nvfp4" else 1e-5  # the library gives this one in bfloat16
    torch.testing.assert_close(format.dequantize(parts, 384), theirs, rtol=tolerance, atol=1e-7)

    scales = dict(parts, weight=weight, weight_scale=parts["weight_scale"].float())
    if "weight_zero_point" in parts:
        scales["weight_zero_point"] = (unpack(parts["weight_zero_point"].T).T - 8).to(torch.int8)
    scales = {name: part for name, part in scales.items() if name not in ("weight_packed", "weight_shape")}
    made = compressor.compress(scales, scheme)
    got = format.dequantize({name: made[name] for name in format.tensors(256, 384)}, 384)
    # Numbers in the middle between two codes may go either way.
    differ = (got - theirs).abs() > 1e-6 + tolerance * theirs.abs()
    assert differ.float().mean() < 0.001
    assert float((got - theirs).abs().max()) < 0.5
