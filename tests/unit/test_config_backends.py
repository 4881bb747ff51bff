"""What the settings accept is what the rest of the server holds and uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server import config, setting_values
from server.engine.attention import registry as attention
from server.engine.moe import registry as moe


def test_attention_names_are_those_of_the_registry() -> None:
    assert set(setting_values.ATTENTION_NAMES) == set(attention.ATTENTION_BACKENDS)


def test_moe_names_are_those_of_the_registry() -> None:
    assert set(setting_values.MOE_NAMES) == set(moe.MOE_BACKENDS)


@pytest.mark.parametrize("name", list(config.Settings.model_fields))
def test_no_setting_is_accepted_and_ignored(name: str) -> None:
    files = [f for f in Path(config.__file__).parent.rglob("*.py") if not f.name.startswith(("config", "flags"))]
    assert any(re.search(rf"settings\.{name}\b", file.read_text(encoding="utf-8")) for file in files)
