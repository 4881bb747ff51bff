"""Reading rope settings in all their spellings, and the rotation itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from server.engine.layers.rope import RopeConfig, Rotary, inverse_frequencies, rotate
from server.errors import UserError

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(config: dict[str, Any], head_dim: int = 64, max_position: int = 4096, factor: float = 1.0) -> RopeConfig:
    return RopeConfig.from_hf(config, head_dim, max_position, factor)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": LLAMA3 | {"rope_type": "llama3"}, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}, "rope_scaling": LLAMA3},
        {"rope_parameters": {"full_attention": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}, "other": None}},
    ],
)
def test_spellings_of_one_setting(config: dict[str, Any]) -> None:
    rope = read(config)
    assert rope == RopeConfig("llama3", 5e5, 64, 4096, 8192, 8.0, 1.0, 4.0)


def test_absent_settings() -> None:
    assert read({}) == RopeConfig("default", 10000.0, 64, 4096, 4096)
    assert read({"rope_scaling": None, "rope_theta": 1e6}).theta == 1e6


@pytest.mark.parametrize(
    ("config", "dim"),
    [
        ({}, 32),
        ({"partial_rotary_factor": 0.25}, 16),
        ({"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 1.0}}, 64),
        ({"rotary_dim": 48}, 48),
    ],
)
def test_partial_rotary(config: dict[str, Any], dim: int) -> None:
    assert read(config, factor=0.5).rotary_dim == dim


def test_top_level_original_length_wins_and_gives_the_yarn_factor() -> None:
    inner = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 2048}
    rope = read({"rope_scaling": inner, "original_max_position_embeddings": 1024})
    assert (rope.original_max_position, rope.factor) == (1024, 4.0)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported; supported are default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing; it must be a positive number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        ({"rotary_dim": 7}, "7 of 64 head dimensions turn"),
        ({"partial_rotary_factor": 2.0}, "128 of 64 head dimensions turn"),
    ],
)
def test_refusals(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(config)


def test_dynamic_is_the_default_at_its_fixed_length() -> None:
    dynamic = read({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    torch.testing.assert_close(inverse_frequencies(dynamic), inverse_frequencies(read({})))


def test_rotation_turns_pairs_by_position_and_leaves_the_rest() -> None:
    rope = read({"rotary_dim": 4, "rope_theta": 100.0}, head_dim=6)
    x = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 5, 1000])
    got = rotate(x.clone(), Rotary(rope, torch.float32, torch.device("cpu"))(positions))
    for t, position in enumerate(positions.tolist()):
        for pair, inv in enumerate((1.0, 0.1)):
            turned = torch.complex(x[t, :, pair], x[t, :, pair + 2]) * complex(
                math.cos(position * inv), math.sin(position * inv)
            )
            torch.testing.assert_close(got[t, :, pair], turned.real, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(got[t, :, pair + 2], turned.imag, atol=1e-4, rtol=1e-4)
    assert torch.equal(got[..., 4:], x[..., 4:])
