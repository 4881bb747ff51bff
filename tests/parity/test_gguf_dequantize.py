"""Our block formulas against gguf-py's, on random bytes: every code, NaN and infinite scales among them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from server.checkpoint.gguf_types import GGUF_TYPES, LOADABLE_TYPES
from server.engine.loading.dequantize import dequantize


@pytest.mark.parametrize("name", LOADABLE_TYPES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 40))
def test_equal_bit_by_bit(name: str, seed: int, blocks: int) -> None:
    kind = GGMLQuantizationType[name]
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = reference(data, kind).reshape(-1)
    found = dequantize(torch.from_numpy(data).view(-1), name).numpy()
    assert found.shape == (blocks * block_size,)
    assert np.array_equal(found, expected, equal_nan=True)


def test_types_agree_with_the_formats_own_table() -> None:
    ours = {number: (kind.name, kind.block_size, kind.block_bytes) for number, kind in GGUF_TYPES.items()}
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    assert {number: theirs[number] for number in ours} == ours


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantised_weights_come_back_close(name: str) -> None:
    weights = np.random.default_rng(0).standard_normal((8, 64), dtype=np.float32)
    data = gguf.quants.quantize(weights, GGMLQuantizationType[name])
    found = dequantize(torch.from_numpy(data).view(-1), name).view(8, 64).numpy()
    assert np.abs(found - weights).max() < (0.02 if name == "Q8_0" else 0.4)
