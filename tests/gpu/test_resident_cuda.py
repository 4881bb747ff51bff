"""The kernels over the state of decoding sequences and over positions, compiled, against torch's operations."""

from __future__ import annotations

import os
import secrets

import pytest
import torch
from resident_cases import check_step, make_case
from rotary_cases import check_angles

from server.engine.kv.groups import Pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="TRITON_INTERPRET is set: nothing is compiled"),
]


@pytest.mark.parametrize("count", [1, 2, 4, 6])
@pytest.mark.parametrize("pages", [Pages(16, 16), Pages(64, 32)], ids=str)
def test_a_step(count: int, pages: Pages) -> None:
    for _ in range(5):
        check_step(make_case(count, pages, secrets.randbits(32)), torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_angles(dtype: torch.dtype) -> None:
    check_angles(dtype, torch.device("cuda", 0))
    check_angles(dtype, torch.device("cuda", 0), scale=1.5)
