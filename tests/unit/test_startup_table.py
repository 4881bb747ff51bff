"""What a person sees when the server is ready."""

from __future__ import annotations

import io
import json
import shlex

import pytest
from rich.console import Console

from server.config import Settings
from server.messages import EngineReady, KVGroup, LoadedModel, ResolvedRow, SpeculativeInfo
from server.spec.settings import SpeculativeSettings
from server.startup import StartupDisplay, example_request

ROWS = [
    ResolvedRow("target", "moe", "torch_int4", "torch_int4", "explicit", "asked for"),
    ResolvedRow("draft", "moe", "auto", "grouped_mm", "auto", "the [preferred] one"),
]


def shown(speculative: SpeculativeInfo | None, width: int = 150) -> str:
    out = io.StringIO()
    display = StartupDisplay(Console(file=out, width=width))
    ready = EngineReady(
        ROWS,
        [KVGroup(0, 128, 64, 10, 31)],
        [LoadedModel("target", "A", 5, ""), LoadedModel("draft", "B", 3, "")],
        1280,
        2**30,
        "cpu",
        1.0,
        400,
        speculative,
    )
    display.ready(ready, "http://x", "m", {}, keyed=False)
    return out.getvalue()


def test_both_roles_are_shown_with_the_drafts() -> None:
    text = shown(SpeculativeInfo("mtp", 3, adaptive=True, synthetic=False))
    assert [line.split()[:5] for line in text.splitlines()[1:3]] == [
        ["target", "moe", "torch_int4", "torch_int4", "explicit"],
        ["draft", "moe", "auto", "grouped_mm", "auto"],
    ]
    assert "the [preferred] one" in text
    assert "speculation: mtp, up to 3 tokens a draft, greedy drafts" in text
    assert "draft: B, 3 parameters" in text and "SYNTHETIC" not in text
    assert "KV group 0: 31 layers, 10 blocks of 128 tokens, kernel pages of 64" in text
    assert "speculation" not in shown(None)


def test_a_narrow_table_loses_nothing() -> None:
    assert "…" not in shown(None, width=50)


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_synthetic_acceptance_has_a_banner(method: str) -> None:
    text = shown(SpeculativeInfo(method, 3, adaptive=False, synthetic=True))
    assert "SYNTHETIC ACCEPTANCE" in text and "worth nothing" in text
    assert f"speculation: {method}, 3 tokens a draft" in text


def test_the_drafts_settings_are_among_those_that_are_told() -> None:
    out = io.StringIO()
    settings = Settings(speculative=SpeculativeSettings(method="ngram", num_speculative_tokens=4))
    StartupDisplay(Console(file=out, width=150)).begin("m", "http://x", settings)
    assert "speculative={'method': 'ngram', 'num_speculative_tokens': 4}" in out.getvalue()


def test_the_example_request_ends_soon_whatever_the_models_defaults() -> None:
    words = shlex.split(example_request("http://x", "it's", keyed=False))
    assert words[:2] == ["curl", "http://x/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("it's", 0, 64)
