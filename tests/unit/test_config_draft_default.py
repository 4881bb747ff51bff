"""Without a word about drafts, the embedded model speculates with the head that is packaged for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from server import config_draft_default
from server.checkpoint.packaged_heads import EMBEDDED_MODEL_HEAD
from server.config import Settings
from server.config_faults import UsageError
from server.flags import config_yaml, parse_serve


@pytest.fixture(autouse=True)
def _a_packaged_head(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("OUTRIDER_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(config_draft_default, "packaged_head", lambda name: Path(name))


def resolved(*flags: str) -> Settings:
    return parse_serve(flags).settings


def test_the_embedded_model_gets_its_head() -> None:
    draft = resolved().speculative
    assert draft is not None
    assert draft.model_dump(exclude_none=True) == {"model": EMBEDDED_MODEL_HEAD}


def test_how_the_target_is_loaded_is_no_matter_of_the_head() -> None:
    draft = resolved("--load-format", "gguf").speculative
    assert draft is not None
    assert draft.model_dump(exclude_none=True) == {"model": EMBEDDED_MODEL_HEAD, "load_format": "auto"}
    named = resolved("--load-format", "gguf", "--speculative-config.load_format", "safetensors").speculative
    assert named is not None and named.load_format == "safetensors"


def test_single_keys_are_settings_of_that_head() -> None:
    draft = resolved("--speculative-config.num_speculative_tokens", "2").speculative
    assert draft is not None
    assert draft.model_dump(exclude_none=True) == {"model": EMBEDDED_MODEL_HEAD, "num_speculative_tokens": 2}


@pytest.mark.parametrize("flags", [("folder",), ("--tokenizer", "folder"), ("--load-format", "dummy")], ids=str)
def test_no_other_model_gets_it(flags: tuple[str, ...]) -> None:
    assert resolved(*flags).speculative is None


def test_nobody_gets_it_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_draft_default, "packaged_head", lambda name: None)
    assert resolved().speculative is None


@pytest.mark.parametrize("block", ["null", '{"method": "none"}', '{"method": "NONE"}'])
def test_it_can_be_turned_off(block: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolved("--speculative-config", block).speculative is None
    file = tmp_path / "config.yaml"
    file.write_text(f"speculative: {block}\n")
    assert resolved("--config", str(file)).speculative is None
    monkeypatch.setenv("OUTRIDER_SPECULATIVE", block)
    assert resolved().speculative is None


def test_a_stronger_source_turns_it_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_SPECULATIVE__METHOD", "none")
    assert resolved().speculative is None
    draft = resolved("--speculative-config", '{"method": "ngram"}').speculative
    assert draft is not None
    assert draft.method == "ngram"
    assert draft.model is None


def test_none_beside_other_settings_is_a_contradiction() -> None:
    with pytest.raises(UsageError, match="does nothing beside method none"):
        resolved("--speculative-config", '{"method": "none", "num_speculative_tokens": 2}')


@pytest.mark.parametrize("flags", [(), ("--speculative-config", "null")], ids=["on", "off"])
def test_print_config_says_what_was_resolved(flags: tuple[str, ...], tmp_path: Path) -> None:
    settings = resolved(*flags)
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(settings))
    assert "speculative" in yaml.safe_load(file.read_text())
    assert resolved("--config", str(file)) == settings
