"""The draft's settings: one block and single keys, from flags, variables and the file, each key by its strength."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from server import config_draft_default, spec
from server.config import Settings
from server.config_draft_keys import DRAFT_KEYS
from server.config_faults import UsageError
from server.flags import check_parser, config_yaml, parse_check, parse_serve, serve_parser
from server.spec.settings import BatchSizeRule, SpeculativeSettings

ROOT = Path(__file__).parents[2]
KEYS = list(SpeculativeSettings.model_fields)
VALUES: dict[str, Any] = {
    "method": "eagle3",
    "model": "draft",
    "num_speculative_tokens": 4,
    "adaptive_k": False,
    "moe_backend": "auto",
    "attention_backend": "torch",
    "kv_cache_dtype": "float32",
    "load_format": "dummy",
    "download_dir": "somewhere",
    "ignore_patterns": ["original/*", "*.bin"],
    "quantization": "fp8",
    "tensor_parallel_size": 1,
    "max_model_len": 2048,
    "draft_sample_method": "probabilistic",
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.75, 0.5],
    "synthetic_acceptance_length": 2.5,
    "num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 64, 0]],
    "prompt_lookup_min": 3,
    "prompt_lookup_max": 4,
    "aux_hidden_state_layers": [2, 15, 27],
}
"""A value of each key that is not its default."""
NEEDED: dict[str, dict[str, Any]] = {
    "method": {"model": "draft"},
    "prompt_lookup_min": {"method": "ngram"},
    "prompt_lookup_max": {"method": "ngram"},
    "aux_hidden_state_layers": {"method": "eagle3", "model": "draft"},
    "synthetic_acceptance_rates": {"method": "mtp", "rejection_sample_method": "synthetic"},
    "synthetic_acceptance_length": {"method": "mtp", "rejection_sample_method": "synthetic"},
    "rejection_sample_method": {"method": "mtp", "synthetic_acceptance_length": 2.5},
}
"""What must stand beside a key for it to mean something; method mtp where it says nothing."""


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("OUTRIDER_"):
            monkeypatch.delenv(name)
    # What the embedded model gets without a word is test_config_draft_default's subject.
    monkeypatch.setattr(config_draft_default, "packaged_head", lambda name: None)


def resolved(*flags: str) -> Settings:
    return parse_serve(flags).settings


def draft(*flags: str) -> dict[str, Any] | None:
    speculative = resolved(*flags).speculative
    return None if speculative is None else speculative.model_dump(exclude_none=True)


def error(*flags: str) -> str:
    with pytest.raises(UsageError) as caught:
        resolved(*flags)
    return str(caught.value)


def text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_without_a_word_there_is_no_draft() -> None:
    assert Settings().speculative is None and draft() is None


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_a_flag_a_variable_and_a_key(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = {**NEEDED.get(key, {"method": "mtp"}), key: VALUES[key]}
    expected = SpeculativeSettings.model_validate(block)
    assert getattr(expected, key) not in (None, False) or key == "adaptive_k"
    assert resolved("--speculative-config", json.dumps(block)).speculative == expected
    pairs = [(f"--speculative-config.{name}", text(value)) for name, value in block.items()]
    assert resolved(*itertools.chain(*pairs)).speculative == expected
    assert resolved(*(f"{flag.replace('_', '-')}={value}" for flag, value in pairs)).speculative == expected
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"speculative": block}))
    assert resolved("--config", str(tmp_path / "c.yaml")).speculative == expected
    for name, value in block.items():
        monkeypatch.setenv(f"OUTRIDER_SPECULATIVE__{name.upper()}", text(value))
    assert resolved().speculative == expected
    for name in block:
        monkeypatch.delenv(f"OUTRIDER_SPECULATIVE__{name.upper()}")
    monkeypatch.setenv("OUTRIDER_SPECULATIVE", json.dumps(block))
    assert resolved().speculative == expected


SOURCES = ("flag key", "flag block", "variable key", "variable block", "file")


@pytest.mark.parametrize("sources", [c for n in range(1, 6) for c in itertools.combinations(SOURCES, n)])
def test_the_strongest_source_wins_key_by_key(
    sources: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    k = {source: i + 1 for i, source in enumerate(SOURCES)}
    block = {source: json.dumps({"method": "ngram", "num_speculative_tokens": k[source]}) for source in SOURCES}
    flags = []
    if "flag key" in sources:
        flags += ["--speculative-config.num_speculative_tokens", "1", "--speculative-config.method=ngram"]
    if "flag block" in sources:
        flags += ["--speculative-config", block["flag block"]]
    if "variable key" in sources:
        monkeypatch.setenv("OUTRIDER_SPECULATIVE__NUM_SPECULATIVE_TOKENS", "3")
        monkeypatch.setenv("OUTRIDER_SPECULATIVE__METHOD", "ngram")
    if "variable block" in sources:
        monkeypatch.setenv("OUTRIDER_SPECULATIVE", block["variable block"])
    if "file" in sources:
        (tmp_path / "c.yaml").write_text(f"speculative: {block['file']}\n")
        flags += ["--config", str(tmp_path / "c.yaml")]
    assert draft(*flags) == {"method": "ngram", "num_speculative_tokens": k[sources[0]]}


def test_each_source_keeps_what_a_stronger_one_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text("speculative:\n  method: mtp\n  moe-backend: torch\n  max_model_len: 7\n")
    monkeypatch.setenv("OUTRIDER_SPECULATIVE__MOE_BACKEND", "AUTO")
    flags = ("--config", str(tmp_path / "c.yaml"), "--speculative-config.max-model-len=9")
    assert draft(*flags) == {"method": "mtp", "moe_backend": "auto", "max_model_len": 9}
    unset = ("--speculative-config", '{"moe_backend": null}', "--config", str(tmp_path / "c.yaml"))
    assert draft(*unset) == {"method": "mtp", "max_model_len": 7}


def test_null_takes_away_what_weaker_sources_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text("speculative: {method: mtp, moe_backend: torch}\n")
    flags = ("--config", str(tmp_path / "c.yaml"), "--speculative-config", "null")
    assert draft(*flags) is None
    assert draft(*flags, "--speculative-config.method", "ngram") == {"method": "ngram"}
    monkeypatch.setenv("OUTRIDER_SPECULATIVE", "null")
    assert draft(*flags[:2]) is None
    monkeypatch.setenv("OUTRIDER_SPECULATIVE__METHOD", "ngram")
    assert draft(*flags[:2]) == {"method": "ngram"}
    (tmp_path / "c.yaml").write_text("speculative:\n")
    monkeypatch.delenv("OUTRIDER_SPECULATIVE")
    monkeypatch.setenv("OUTRIDER_SPECULATIVE__METHOD", "")
    assert draft(*flags[:2]) is None


def test_the_flags_spelling_is_taken_in_the_file_and_in_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text("speculative-config: {method: ngram}\n")
    assert draft("--config", str(tmp_path / "c.yaml")) == {"method": "ngram"}
    monkeypatch.setenv("OUTRIDER_SPECULATIVE_CONFIG", '{"method": "mtp"}')
    assert draft() == {"method": "mtp"}
    monkeypatch.setenv("OUTRIDER_SPECULATIVE", '{"method": "mtp"}')
    assert "are the same setting; keep one" in error()
    (tmp_path / "c.yaml").write_text("speculative-config: {method: ngram}\nspeculative: {method: ngram}\n")
    assert "speculative is given twice" in error("--config", str(tmp_path / "c.yaml"))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_speculative_tokens", "4", 4),
        ("adaptive_k", "False", False),
        ("adaptive_k", "true", True),
        ("synthetic_acceptance_rates", "0.75, 0.5", (0.75, 0.5)),
        ("synthetic_acceptance_rates", "[0.75, 0.5]", (0.75, 0.5)),
        ("synthetic_acceptance_length", "2.5", 2.5),
        ("aux_hidden_state_layers", "2,15,27", (2, 15, 27)),
        ("ignore_patterns", "*.bin", ("*.bin",)),
        ("moe_backend", "Grouped_MM", "grouped_mm"),
        ("attention_backend", "TORCH_SDPA", "torch"),
        ("kv_cache_dtype", "bf16", "bfloat16"),
        ("num_speculative_tokens_per_batch_size", "[[1, 4, 5]]", (BatchSizeRule(lo=1, hi=4, k=5),)),
    ],
)
def test_text_becomes_what_the_key_holds(key: str, value: str, expected: object, monkeypatch: Any) -> None:
    needed = json.dumps(NEEDED.get(key, {"method": "mtp"}))
    by_flag = resolved("--speculative-config", needed, f"--speculative-config.{key}", value)
    monkeypatch.setenv(f"OUTRIDER_SPECULATIVE__{key.upper()}", value)
    by_variable = resolved("--speculative-config", needed)
    assert getattr(by_flag.speculative, key) == expected == getattr(by_variable.speculative, key)


NGRAM = {"method": "ngram"}
MTP = {"method": "mtp"}


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        ({**MTP, "moe_backnd": "torch"}, ["unknown draft setting moe_backnd", "did you mean moe_backend?"]),
        ({**MTP, "zzz": 1}, ["unknown draft setting zzz", "there are method, model"]),
        ({**NGRAM, "num_speculative_tokens": 0}, ["num_speculative_tokens: 0", "a whole number from 1 to 16"]),
        ({**NGRAM, "num_speculative_tokens": -1}, ["num_speculative_tokens: -1", "from 1 to 16"]),
        ({**NGRAM, "num_speculative_tokens": 10000}, ["num_speculative_tokens: 10000", "from 1 to 16"]),
        ({**NGRAM, "num_speculative_tokens": 10**400}, ["num_speculative_tokens: 1000", "from 1 to 16"]),
        ({**NGRAM, "num_speculative_tokens": "three"}, ["num_speculative_tokens: three", "from 1 to 16"]),
        ({**NGRAM, "num_speculative_tokens": 3.5}, ["num_speculative_tokens: 3.5", "from 1 to 16"]),
        ({**NGRAM, "num_speculative_tokens": True}, ["num_speculative_tokens: true", "from 1 to 16"]),
        ({**NGRAM, "num_speculative_tokens": [3]}, ["num_speculative_tokens: [3]", "from 1 to 16"]),
        ({**MTP, "max_model_len": 0}, ["max_model_len: 0", "a whole number of at least 1"]),
        ({**MTP, "moe_backend": True}, ["moe_backend: true", "not true or false"]),
        ({**MTP, "moe_backend": "flash"}, ["moe_backend: flash", "must be auto or one of torch, grouped_mm"]),
        ({**MTP, "moe_backend": 5}, ["moe_backend: 5", "must be text"]),
        ({**MTP, "attention_backend": "flash"}, ["attention_backend: flash", "must be auto or one of torch"]),
        ({**MTP, "kv_cache_dtype": "int8"}, ["kv_cache_dtype: int8", "'bfloat16'"]),
        ({**MTP, "adaptive_k": "maybe"}, ["adaptive_k: maybe", "must be true or false"]),
        ({"method": "eagle"}, ["method: eagle", "must be 'ngram', 'draft_model', 'eagle3', 'mtp', or 'none'"]),
        ({"method": "auto"}, ["method: auto", "'ngram'"]),
        ({}, ["method is missing", "ngram, draft_model, eagle3, mtp, none"]),
        ({"method": "eagle3"}, ["model: method eagle3 needs one, a folder or a hub id"]),
        ({**NGRAM, "load_format": "dummy"}, ["load_format: dummy", "ngram has no draft model"]),
        ({**MTP, "prompt_lookup_max": 4}, ["prompt_lookup_max: 4", "belongs to ngram"]),
        ({**NGRAM, "prompt_lookup_min": 9, "prompt_lookup_max": 4}, ["prompt_lookup_min: 9", "is above"]),
        ({**NGRAM, "synthetic_acceptance_length": 2}, ["synthetic_acceptance_length: 2", "does nothing unless"]),
        ({**NGRAM, "rejection_sample_method": "synthetic"}, ["needs exactly one of synthetic_acceptance_rates"]),
        ({**NGRAM, "synthetic_acceptance_rates": [0.5, 2]}, ["synthetic_acceptance_rates: [0.5, 2]", "[1] must be"]),
        ({**NGRAM, "synthetic_acceptance_rates": [True]}, ["not true or false"]),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 2]]}, ["[lo, hi, k]", "has 2"]),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[3, 2, 1]]}, ["lo ≤ hi"]),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 2, 99]]}, ["[0] [k]", "less than or equal to 16"]),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [7]}, ["must be [lo, hi, k], three whole numbers"]),
        ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 2, True]]}, ["not true or false"]),
        ({**MTP, "aux_hidden_state_layers": [1]}, ["aux_hidden_state_layers: [1]", "belongs to eagle3"]),
    ],
)
def test_a_wrong_value_names_the_place_the_key_and_what_is_right(block: dict[str, Any], parts: list[str]) -> None:
    message = error("--speculative-config", json.dumps(block))
    assert "--speculative-config" in message and all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speculative-config.moe_backnd", "x"], "did you mean moe_backend?"),
        (["--speculative-config.k=3"], "unknown flag --speculative-config.k; there are method"),
        (["--speculative-config.method"], "--speculative-config.method"),
        (["--speculative.method", "ngram"], "did you mean --speculative-config?"),
        (["--speculative-config", "ngram"], "is not JSON"),
        (["--speculative-config", "[1]"], 'must be a JSON object such as \'{"method": "ngram"}\''),
        (["--speculative-config", '{"method": "mtp", "method": "mtp"}'], "method is given twice"),
        (["--speculative-config", '{"max-model-len": 1, "max_model_len": 2}'], "max_model_len is given twice"),
        (["--speculative-config", "[" * 100_000], "is not JSON"),
        (["--speculative-config.method=mtp", "--speculative-config.num_speculative_tokens", "-1"], "tokens -1: must"),
        (["--speculative-config.method=eagle3", "--speculative-config.aux_hidden_state_layers=[1"], "not a JSON list"),
    ],
)
def test_a_wrong_flag_is_explained(flags: list[str], message: str) -> None:
    assert message in error(*flags)


def test_wrong_values_of_the_draft_and_others_are_named_at_once() -> None:
    message = error("--port", "x", "--speculative-config.model", "m", "--speculative-config.max_model_len", "y")
    assert "--port x" in message and "--speculative-config.max_model_len y" in message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OUTRIDER_SPECULATIVE__MOE_BACKND", "torch", "did you mean OUTRIDER_SPECULATIVE__MOE_BACKEND?"),
        ("OUTRIDER_SPECULATIVE_MOE_BACKEND", "torch", "did you mean OUTRIDER_SPECULATIVE__MOE_BACKEND?"),
        ("OUTRIDER_SPECULATIV__METHOD", "mtp", "did you mean OUTRIDER_SPECULATIVE__METHOD?"),
        ("OUTRIDER_SPECULATIVE", "mtp", "OUTRIDER_SPECULATIVE mtp: is not JSON"),
        ("OUTRIDER_SPECULATIVE", '{"method": "mtp", "moe_backend": "x"}', "OUTRIDER_SPECULATIVE, moe_backend: x"),
        ("OUTRIDER_SPECULATIVE__NUM_SPECULATIVE_TOKENS", "17", "NUM_SPECULATIVE_TOKENS=17: must be a whole number"),
    ],
)
def test_a_wrong_variable_is_named_by_its_name(name: str, value: str, message: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(name, value)
    assert message in error()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("port: 1\nspeculative:\n  method: mtp\n  moe_backnd: x\n", "line 4: unknown draft setting moe_backnd"),
        ("speculative:\n  method: mtp\n  method: mtp\n", "line 3: method is given twice"),
        ("port: 1\nspeculative: ngram\n", "line 2: speculative must be a mapping"),
        ("speculative: [ngram]\n", "must be a mapping"),
        ("speculative: {method: ngram, num_speculative_tokens: true}\n", "line 1, num_speculative_tokens: true"),
        ("speculativ: {method: ngram}\n", "did you mean speculative?"),
        ("speculative: {}\n", "method is missing"),
    ],
)
def test_a_wrong_file_is_explained(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(content)
    assert message in error("--config", str(tmp_path / "c.yaml"))


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    from server.cli import main

    for command in ("serve", "check"):
        assert main([command, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 0}']) == 2
        assert "num_speculative_tokens: 0" in capsys.readouterr().err


@pytest.mark.parametrize("key", [None, *KEYS])
def test_print_config_is_taken_back(key: str | None, tmp_path: Path) -> None:
    flags = []
    if key is not None:
        flags = ["--speculative-config", json.dumps({**NEEDED.get(key, {"method": "mtp"}), key: VALUES[key]})]
    settings = resolved(*flags)
    (tmp_path / "c.yaml").write_text(config_yaml(settings))
    assert resolved("--config", str(tmp_path / "c.yaml")) == settings
    assert (settings.speculative is None) == (key is None)


@given(st.sampled_from(KEYS), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_any_value_is_taken_and_kept_or_refused(key: str, value: object) -> None:
    try:
        settings = resolved("--speculative-config", json.dumps({"method": "mtp", key: value}))
    except UsageError as refused:
        assert "--speculative-config" in str(refused) and "pydantic" not in str(refused)
    else:
        assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_the_engine_reads_the_same_tree() -> None:
    flags = ("--speculative-config", json.dumps({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 2, 0]]}))
    settings = resolved(*flags, "--speculative-config.adaptive_k", "auto")
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_check_takes_the_same_settings() -> None:
    flags = ["m", "--speculative-config.method=ngram", "--seed", "3"]
    assert parse_check([*flags, "--json"]).settings == resolved(*flags)
    assert parse_check([*flags, "--json"]).as_json and not parse_check(flags).as_json
    with pytest.raises(UsageError, match="print-config"):
        parse_check(["--print-config"])


def test_help_tells_each_keys_states() -> None:
    assert set(DRAFT_KEYS) == set(KEYS)
    for shown in (serve_parser().format_help(), check_parser().format_help()):
        words = " ".join(shown.split())
        for name, key in DRAFT_KEYS.items():
            assert f"--speculative-config.{name} {key.metavar} unset: " in words
            assert f"unset: {key.unset}" in words and f"named: {key.named}." in words


def test_the_documentation_has_a_row_for_each_key() -> None:
    text = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8")
    section = text.split("\n## The draft's settings\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == KEYS


def test_the_examples_of_the_documentation_are_right() -> None:
    text = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8")
    methods = [
        resolved("--speculative-config", block).speculative for block in re.findall(r"-config '(\{.*?\})'", text)
    ]
    assert [draft.method for draft in methods if draft][:4] == ["ngram", "draft_model", "eagle3", "mtp"]


READ_AS = {"prompt_lookup_min": "lookup_min", "prompt_lookup_max": "lookup_max"}


@pytest.mark.parametrize("key", KEYS)
def test_no_draft_setting_is_accepted_and_ignored(key: str) -> None:
    files = [file for file in Path(spec.__file__).parent.glob("*.py") if file.name != "settings.py"]
    used = re.compile(rf"settings\.{READ_AS.get(key, key)}\b")
    assert any(used.search(file.read_text(encoding="utf-8")) for file in files)
