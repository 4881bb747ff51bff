"""Rotary position embeddings: the frequencies of each scaling type, and the rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from server.engine.kernels.available import compiles_for
from server.engine.layers.hf_keys import Keys
from server.errors import UserError

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles. Fields that a type does not use keep their neutral value."""

    rope_type: str
    theta: float
    rotary_dim: int
    """Leading dimensions of a head that turn; the others pass through."""
    max_position: int
    """`max_position_embeddings`. `dynamic` is fixed at this length, so cached keys never change their angle."""
    original_max_position: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cosines and sines."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], head_dim: int, max_position: int, rotary_factor: float) -> RopeConfig:
        """Read `rope_parameters`, or `rope_theta` with `rope_scaling`; tools write one, the other or both.

        Args:
            config: the config.json.
            head_dim: width of a head.
            max_position: `max_position_embeddings`.
            rotary_factor: the family's share of a head that turns, for a config that names none.

        Raises:
            UserError: an unknown type, or a key of the type that is missing or out of range.
        """
        keys = _rope_keys(config, max_position, rotary_factor)
        rope_type = keys.values.get("rope_type") or keys.values.get("type") or "default"
        if rope_type not in SUPPORTED_ROPE_TYPES:
            supported = ", ".join(SUPPORTED_ROPE_TYPES)
            raise UserError(f"config.json: rope type {rope_type!r} is not supported; supported are {supported}")
        if "rotary_dim" in keys:
            rotary_dim = keys.integer("rotary_dim")
        else:
            rotary_dim = int(head_dim * keys.number("partial_rotary_factor"))
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise UserError(
                f"config.json: {rotary_dim} of {head_dim} head dimensions turn; this must be even and 2 to {head_dim}"
            )
        original = keys.integer("original_max_position_embeddings")
        if rope_type == "yarn" and "factor" not in keys:
            factor = max_position / original
        else:
            factor = keys.number("factor") if rope_type != "default" else 1.0
        llama3, yarn = rope_type == "llama3", rope_type == "yarn"
        return cls(
            rope_type=rope_type,
            theta=keys.number("rope_theta"),
            rotary_dim=rotary_dim,
            max_position=max_position,
            original_max_position=original,
            factor=factor,
            low_freq_factor=keys.number("low_freq_factor") if llama3 else 1.0,
            high_freq_factor=keys.number("high_freq_factor") if llama3 else 4.0,
            beta_fast=keys.number("beta_fast") if yarn and "beta_fast" in keys else 32.0,
            beta_slow=keys.number("beta_slow") if yarn and "beta_slow" in keys else 1.0,
            truncate=not yarn or "truncate" not in keys or keys.flag("truncate"),
            attention_factor=_yarn_attention_factor(keys, factor) if yarn else 1.0,
        )


def _rope_keys(config: Mapping[str, Any], max_position: int, rotary_factor: float) -> Keys:
    found: dict[str, Any] = {
        "rope_theta": 10000.0,
        "partial_rotary_factor": rotary_factor,
        "original_max_position_embeddings": max_position,
    }

    def add(values: Mapping[str, Any]) -> None:
        found.update({name: value for name, value in values.items() if value is not None})

    add({name: config.get(name) for name in ("rope_theta", "partial_rotary_factor", "rotary_dim")})
    for name in ("rope_parameters", "rope_scaling"):
        inner = config.get(name) or {}
        if not isinstance(inner, Mapping):
            raise UserError(f"config.json: {name} is {inner!r}; it must be an object")
        # May be nested by layer type; models with other types than this one are refused elsewhere.
        add(inner.get("full_attention") or inner)
    # The one exception to "inside wins": this key, if it stands at the top as well.
    add({"original_max_position_embeddings": config.get("original_max_position_embeddings")})
    return Keys(found, {}, "config.json, rope parameters")


def _yarn_attention_factor(keys: Keys, factor: float) -> float:
    """YaRN, https://arxiv.org/abs/2309.00071, section 3.4, with the two mscale keys of DeepSeek's configs."""
    if "attention_factor" in keys:
        return keys.number("attention_factor")

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if keys.values.get("mscale") and keys.values.get("mscale_all_dim"):
        return scale(keys.number("mscale")) / scale(keys.number("mscale_all_dim"))
    return scale(1.0)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Angle per position of each pair of dimensions: fp32 [rotary_dim / 2], on the CPU."""
    d, theta = rope.rotary_dim, rope.theta
    if rope.rope_type == "dynamic" and d > 2:
        # At its fixed length L = max_position the factor of theta, f * L / max - (f - 1), is 1.
        theta *= (rope.factor - (rope.factor - 1)) ** (d / (d - 2))
    inv = 1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
    if rope.rope_type == "linear":
        return inv / rope.factor
    if rope.rope_type == "llama3":
        turns = rope.original_max_position * inv / (2 * math.pi)  # within the original context
        low, high = rope.low_freq_factor, rope.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1) if high != low else (turns > low).float()
        return (1 - kept) * inv / rope.factor + kept * inv
    if rope.rope_type == "yarn":
        low, high = (_yarn_bound(rope, beta) for beta in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(d // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return inv * (1 - ramp) + inv / rope.factor * ramp
    return inv


def _yarn_bound(rope: RopeConfig, rotations: float) -> float:
    """The dimension (not rounded) that turns so many times within the original context."""
    wavelength = rope.original_max_position / (rotations * 2 * math.pi)
    return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))


class Angles(NamedTuple):
    """Cosines and sines of a step's positions, both [T, 1, rotary_dim]; the first half of the sines is negative."""

    cos: Tensor
    sin: Tensor


class Rotary(nn.Module):
    """Positions to angles, computed once per step: there is no table, so no length to outgrow."""

    def __init__(self, rope: RopeConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.scale = rope.attention_factor
        self.dtype = dtype
        self.inv = inverse_frequencies(rope).to(device)
        self.compiled = compiles_for(device)

    def forward(self, positions: Tensor) -> Angles:
        """Int64 [T] -> the angles in the model's dtype, computed in fp32."""
        if self.compiled:
            from server.engine.kernels.angles import angles as compiled_angles

            return Angles(*compiled_angles(positions, self.inv, self.scale, self.dtype))
        angles = positions[:, None].float() * self.inv
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        both = torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype)
        return Angles(both[0].unsqueeze(1), both[1].unsqueeze(1))


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turn the pairs (j, j + rotary_dim / 2) of every head.

    Args:
        x: [T, heads, head_dim]; where only a part of it turns, that part is overwritten.
        angles: of the T positions.

    Returns:
        [T, heads, head_dim].
    """
    cos, sin = angles
    size = cos.shape[-1]
    turning = x if size == x.shape[-1] else x[..., :size]
    turned = torch.addcmul(turning * cos, turning.roll(size // 2, -1), sin)
    if turning is x:
        return turned
    turning.copy_(turned)
    return x
