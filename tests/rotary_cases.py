"""Positions near and far, for the kernel that makes angles of them."""

from __future__ import annotations

import torch

from server.engine.kernels.angles import angles
from server.engine.layers.rope import RopeConfig, Rotary

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check_angles(dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> None:
    rope = RopeConfig.from_hf({"rope_theta": 1e6}, 128, 40960, 1.0)
    positions = torch.tensor([0, 1, 7, 511, 4095, 40959, 131071, 1_000_003])
    inv = Rotary(rope, dtype, torch.device("cpu")).inv
    # What the fp32 product of position and frequency says, in fp64 from there on.
    exact = (positions[:, None].float() * inv).double()
    cos, sin = angles(positions.to(device), inv.to(device), scale, dtype)
    assert cos.dtype is sin.dtype is dtype and cos.shape == sin.shape == (8, 1, 128)
    for got, want in ((cos, (exact.cos(), exact.cos())), (sin, (-exact.sin(), exact.sin()))):
        expected = torch.cat(want, -1)[:, None] * scale
        torch.testing.assert_close(got.double().cpu(), expected, atol=TOLERANCE[dtype], rtol=0)
