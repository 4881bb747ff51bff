"""What stops the start: every impossible value names the role, the key, the value, the reason and what would work."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from server.config import Settings
from server.config_faults import UsageError
from server.engine.plan import check_plan
from server.flags import parse_check
from tests.spec.override_models import NEURAL, Folders, write_folders
from tests.spec.tiny_models import write_llama

ALL = ("ngram", *NEURAL)


@dataclass(frozen=True)
class Refused:
    """One line: a value, the proposers that must refuse it, and what the message has to say besides key and value."""

    key: str
    value: Any
    says: tuple[str, ...]
    by: tuple[str, ...] = NEURAL
    more: dict[str, Any] = field(default_factory=dict)
    """Further keys of the draft."""
    target: tuple[str, ...] = ()
    """Flags of the target."""

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


NO_MODEL = ("ngram has no draft model", "Leave it out")
NAMES = "auto or one of torch, grouped_mm"
K = "a whole number from 1 to 16"
FACTS = [
    Refused("moe_backend", "flash", (NAMES,)),
    Refused("moe_backend", 5, ("must be text",)),
    Refused(
        "moe_backend", "torch_int4", ("it takes 4-bit integer ones only", "what would work: auto, grouped_mm, torch")
    ),
    Refused("moe_backend", "torch", NO_MODEL, ("ngram",)),
    Refused("moe_backend", "auto", NO_MODEL, ("ngram",)),
    Refused("attention_backend", "flash", ("auto or one of torch, triton",)),
    Refused("attention_backend", "torch", NO_MODEL, ("ngram",)),
    Refused("kv_cache_dtype", "int8", ("'bfloat16', 'float16', 'float32' or 'fp8'",)),
    Refused("kv_cache_dtype", "auto", NO_MODEL, ("ngram",)),
    Refused("load_format", "pickle", ("'safetensors', 'gguf' or 'dummy'",)),
    Refused("load_format", "gguf", ("holds safetensors weights", "Set speculative_config.load_format to auto")),
    Refused("load_format", "dummy", NO_MODEL, ("ngram",)),
    Refused("download_dir", "", ("must not be empty",)),
    Refused("download_dir", "somewhere", ("nothing is downloaded for it", "Leave it out"), ("mtp",)),
    Refused("download_dir", "somewhere", NO_MODEL, ("ngram",)),
    Refused("ignore_patterns", 5, ("list",)),
    Refused("ignore_patterns", ["*.safetensors"], ("holds no safetensors weights",)),
    Refused("ignore_patterns", ["x"], NO_MODEL, ("ngram",)),
    Refused("quantization", "fp8", ("stored as none", "name one of: auto, none")),
    Refused("quantization", "", ("must not be empty",)),
    Refused("quantization", "none", NO_MODEL, ("ngram",)),
    Refused("tensor_parallel_size", 2, ("it must be 1 or the target's, 1 here",)),
    Refused("tensor_parallel_size", 0, ("a whole number of at least 1",)),
    Refused("tensor_parallel_size", 1, NO_MODEL, ("ngram",)),
    Refused("max_model_len", 0, ("a whole number of at least 1",)),
    Refused("max_model_len", 4096, ("the draft's positions end at 2048", "Use at most 2048")),
    Refused("max_model_len", 64, NO_MODEL, ("ngram",)),
    *(Refused("num_speculative_tokens", value, (K,), ALL) for value in (0, -1, 17, 10_000, "three", 2.5, True)),
    Refused("adaptive_k", "maybe", ("true or false",), ALL),
    Refused("draft_sample_method", "random", ("'greedy' or 'probabilistic'",)),
    Refused("draft_sample_method", "greedy", NO_MODEL, ("ngram",)),
    Refused("rejection_sample_method", "none", ("'standard' or 'synthetic'",), ALL),
    Refused("rejection_sample_method", "synthetic", ("exactly one of synthetic_acceptance_rates and",), ALL),
    Refused(
        "synthetic_acceptance_rates",
        [0.5, 0.5],
        ("holds 2 rates", "one for each of the 3 positions"),
        ALL,
        {"rejection_sample_method": "synthetic", "num_speculative_tokens": 3},
    ),
    Refused(
        "synthetic_acceptance_length",
        5,
        ("1 to 4 tokens",),
        ALL,
        {"rejection_sample_method": "synthetic", "num_speculative_tokens": 3},
    ),
    Refused("synthetic_acceptance_length", 2, ("does nothing unless rejection_sample_method is synthetic",), ALL),
    Refused("num_speculative_tokens_per_batch_size", [[1, 2]], ("[lo, hi, k]",), ALL),
    Refused("num_speculative_tokens_per_batch_size", [[3, 2, 1]], ("lo ≤ hi",), ALL),
    Refused(
        "num_speculative_tokens_per_batch_size",
        [[1, 8, 4]],
        ("at most 2 tokens", "set speculative_config.num_speculative_tokens to 4"),
        ALL,
        {"num_speculative_tokens": 2},
    ),
    Refused("prompt_lookup_min", 2, ("belongs to ngram",)),
    Refused("prompt_lookup_max", 2, ("belongs to ngram",)),
    Refused("prompt_lookup_min", 0, ("from 1 to 64",), ALL),
    Refused("prompt_lookup_min", 7, ("above prompt_lookup_max 3",), ("ngram",), {"prompt_lookup_max": 3}),
    Refused("aux_hidden_state_layers", [0, 1, 2], ("belongs to eagle3",), ("draft_model", "mtp", "mtp_own")),
    Refused("aux_hidden_state_layers", [0, 1, 2], NO_MODEL, ("ngram",)),
    Refused("aux_hidden_state_layers", [0, 1, 9], ("0 to 3",), ("eagle3",)),
    Refused("aux_hidden_state_layers", [0, 1], ("takes the hidden states of 3 layers",), ("eagle3",)),
    Refused("moe_backnd", "torch", ("unknown draft setting moe_backnd", "did you mean moe_backend?"), ALL),
]
CASES = [(proposer, fact) for fact in FACTS for proposer in fact.by]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("refused"))


def start_error(target: Path, speculative: dict[str, Any], *flags: str) -> str:
    """What the user reads, be it a fault of the command line or of the plan."""
    try:
        settings = parse_check([str(target), "--speculative-config", json.dumps(speculative), *flags]).settings
    except UsageError as error:
        return str(error)
    report = check_plan(settings)
    assert not report.ok and not report.rows, "the start was not refused"
    (message,) = report.errors
    assert message.startswith("draft: ")
    return message


@pytest.mark.parametrize(("proposer", "fact"), CASES, ids=[f"{proposer}-{fact}" for proposer, fact in CASES])
def test_the_message_says_what_is_wrong_and_what_would_work(proposer: str, fact: Refused, folders: Folders) -> None:
    keys = folders.drafts[proposer] | fact.more | {fact.key: fact.value}
    message = start_error(folders.target, keys, *fact.target)
    # Of a list of rules, the wrong one is shown; of a key that does not exist, no value.
    value = fact.value[0] if fact.key == "num_speculative_tokens_per_batch_size" else fact.value
    assert "speculative" in message and fact.key in message
    assert str(value) in message or json.dumps(value) in message or fact.key == "moe_backnd", message
    assert all(part in message for part in fact.says), message


@pytest.mark.parametrize("draft", ["draft_model", "mtp"])
def test_a_moe_backend_for_a_draft_without_experts(draft: str, folders: Folders, tmp_path: Path) -> None:
    llama = write_llama(tmp_path / "llama")
    message = start_error(folders.target, {"method": "draft_model", "model": str(llama), "moe_backend": "torch"})
    assert message.startswith("draft: speculative_config.moe_backend torch: the draft ") and "has no experts" in message
    # Nothing is wrong with leaving the choice to the draft, or with a target's that means nothing for it.
    for keys, flags in (({"moe_backend": "auto"}, []), ({}, ["--moe-backend", "torch"])):
        speculative = json.dumps({"method": "draft_model", "model": str(llama)} | keys)
        assert check_plan(parse_check([str(folders.target), "--speculative-config", speculative, *flags]).settings).ok


def test_keys_of_another_method_are_refused_for_an_inferred_one(folders: Folders) -> None:
    model = folders.drafts["mtp_own"]["model"]
    message = start_error(folders.target, {"model": model, "aux_hidden_state_layers": [1, 2, 3]})
    assert message.startswith("draft: speculative_config.aux_hidden_state_layers: ") and "the method is mtp" in message


def test_drafts_of_another_kind_and_broken_files(folders: Folders, tmp_path: Path) -> None:
    head, alone = (folders.drafts[proposer]["model"] for proposer in ("eagle3", "mtp_own"))
    llama = str(write_llama(tmp_path / "llama"))
    short = Path(shutil.copytree(head, tmp_path / "short")) / "model.safetensors"
    short.write_bytes(short.read_bytes()[:-1024])
    for method, model, says in (
        ("draft_model", head, ["is an EAGLE-3 head, not a whole model", "speculative_config.method to eagle3"]),
        ("eagle3", alone, ["method eagle3", "lacks fc.weight"]),
        ("mtp", llama, ["method mtp", "no MTP weights"]),
        ("mtp", head, ["method mtp", "no MTP weights"]),
        (None, str(short.parent), ["speculative_config.model", "model.safetensors", "truncated"]),
        ("draft_model", str(tmp_path / "nothing"), ["speculative_config.model", "does not exist"]),
    ):
        message = start_error(folders.target, {"model": model} | ({"method": method} if method else {}))
        assert all(part in message for part in says), message


def test_a_load_format_of_the_targets_that_the_draft_cannot_inherit(folders: Folders) -> None:
    """The embedded default model is a GGUF file."""
    draft = {"method": "draft_model", "model": str(folders.target)}
    options = {"load_format": "gguf", "speculative": draft}
    (message,) = check_plan(Settings.model_validate(options)).errors
    assert message.startswith("draft: speculative_config.load_format is unset, so it inherits the target's 'gguf': ")
    assert message.endswith("Set speculative_config.load_format to auto or to what it is.")
    # With the way out taken, the next thing that does not fit is another one.
    options["speculative"] = draft | {"load_format": "auto"}
    (message,) = check_plan(Settings.model_validate(options)).errors
    assert "another vocabulary: the target embeds 49152 tokens, the draft 260" in message
