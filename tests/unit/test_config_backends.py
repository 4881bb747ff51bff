"""The names that the settings accept are those that the engine's registries hold."""

from __future__ import annotations

from server import config
from server.engine.attention import registry as attention
from server.engine.moe import registry as moe


def test_attention_names_are_those_of_the_registry() -> None:
    assert set(config.ATTENTION_BACKENDS) == set(attention.ATTENTION_BACKENDS)


def test_moe_names_are_those_of_the_registry() -> None:
    assert set(config.MOE_BACKENDS) == set(moe.MOE_BACKENDS)
