"""Weights of a draft in the packed form: rounded to 8 bits with a scale for every 32 columns."""

from __future__ import annotations

import pytest
import torch

from server.engine.cpu.pack import pack_plain, pack_rounded

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def test_each_weight_is_off_by_half_a_step_at_most() -> None:
    torch.manual_seed(0)
    weight = (torch.randn(40, 96) * torch.logspace(-3, 1, 40)[:, None]).bfloat16()
    weight[3] = 0
    weight[5, 32:64] = 0
    packed = pack_rounded(weight, None)
    assert packed is not None and packed.bits == 8
    rebuilt = packed.product(torch.eye(96, dtype=torch.bfloat16), torch.float32).T
    steps = weight.float().unflatten(1, (3, 32)).abs().amax(-1).repeat_interleave(32, 1) / 127
    # Half a step, and what float16 takes from a scale: 2^-11 of at most 127 steps.
    assert bool(((rebuilt - weight.float()).abs() <= steps * (0.5 + 127 * 2.0**-11) * 1.01).all())


def test_what_is_tiny_beside_the_rest_may_vanish() -> None:
    """As in a head that begins as the identity beside noise: float16 has no scales for the noise."""
    torch.manual_seed(1)
    weight = torch.cat((torch.eye(64), torch.randn(64, 64) * 1e-5, torch.randn(64, 64) * 1e-7), 1).bfloat16()
    packed = pack_rounded(weight, None)
    assert packed is not None
    rebuilt = packed.product(torch.eye(192, dtype=torch.bfloat16), torch.float32).T
    assert bool(((rebuilt - weight.float()).abs() < 1e-4).all())
    assert bool(((rebuilt - weight.float()).norm() / weight.float().norm() < 1e-4).all())


def test_scales_that_float16_does_not_hold_are_not_rounded() -> None:
    weight = torch.full((16, 32), 2.0**30).bfloat16()
    assert pack_rounded(weight, None) is None


def test_a_model_that_answers_is_not_rounded() -> None:
    packed = pack_plain(torch.randn(16, 32).bfloat16(), None)
    assert packed is not None and packed.bits == 16
