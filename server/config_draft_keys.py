"""What each of the draft's settings means in its three states, in short: for --help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.setting_values import ATTENTION_NAMES, MOE_NAMES


@dataclass(frozen=True)
class DraftKey:
    """One key of --speculative-config. None: the state does not exist."""

    metavar: str
    unset: str
    named: str
    auto: str | None = None

    @property
    def help(self) -> str:
        """One line for --help."""
        states = [f"unset: {self.unset}", f"auto: {self.auto}" if self.auto else "", f"named: {self.named}"]
        return "; ".join(state for state in states if state) + "."


_TARGETS = "the target's"
_SAME = "as unset"

DRAFT_KEYS: Mapping[str, DraftKey] = {
    "method": DraftKey("NAME", "told from the draft's config.json", "ngram, draft_model, eagle3, mtp or none"),
    "model": DraftKey(
        "MODEL", "mtp drafts with the target's own layers; ngram has no model", "a folder or a hub id of the draft"
    ),
    "num_speculative_tokens": DraftKey(
        "COUNT", "what the draft's config says, else 3, for ngram 5", "the longest draft, k, from 1 to 16"
    ),
    "adaptive_k": DraftKey(
        "true|false",
        "true when num_speculative_tokens is unset, else false",
        "whether a draft's length follows how the request's drafts fare",
        _SAME,
    ),
    "moe_backend": DraftKey(
        "NAME",
        "what the target was asked for, or an error when the draft's weights cannot use it",
        f"{', '.join(MOE_NAMES)}, for the draft alone",
        "chosen by the draft's own weights",
    ),
    "attention_backend": DraftKey(
        "NAME",
        "chosen for the draft, not inherited",
        f"{', '.join(ATTENTION_NAMES)}, for the draft alone",
        _SAME,
    ),
    "kv_cache_dtype": DraftKey(
        "DTYPE", _TARGETS, "bfloat16, float16, float32 or fp8, for the draft alone", "the draft's own dtype"
    ),
    "load_format": DraftKey(
        "FORMAT", _TARGETS, "safetensors, gguf or dummy, for the draft alone", "what the draft's files are"
    ),
    "download_dir": DraftKey("FOLDER", _TARGETS, "where the draft's downloads are kept", "the Hugging Face cache"),
    "ignore_patterns": DraftKey(
        "PATTERNS", "every weight file is read", "files of the draft to leave aside, such as original/*", _SAME
    ),
    "quantization": DraftKey(
        "NAME", "what the draft's checkpoint says, never the target's", "checked against the checkpoint", _SAME
    ),
    "tensor_parallel_size": DraftKey("COUNT", _TARGETS, "1 or the target's"),
    "max_model_len": DraftKey(
        "TOKENS", "the shorter of the target's and the draft's", "longer sequences go on without drafts"
    ),
    "draft_sample_method": DraftKey("greedy|probabilistic", "greedy", "how the draft chooses its tokens"),
    "rejection_sample_method": DraftKey(
        "standard|synthetic", "standard", "synthetic accepts by lot: for benchmarks, its text is worth nothing"
    ),
    "synthetic_acceptance_rates": DraftKey(
        "RATES", "none", "for synthetic: the rate at each position, such as [0.8, 0.6]"
    ),
    "synthetic_acceptance_length": DraftKey(
        "TOKENS", "none", "for synthetic: tokens per step on average, from 1 to k + 1"
    ),
    "num_speculative_tokens_per_batch_size": DraftKey(
        "RULES", "k at any load", "[[lo, hi, k], ...]: k while lo to hi sequences run; 0 is no draft"
    ),
    "prompt_lookup_min": DraftKey("TOKENS", "2", "for ngram: the shortest match, from 1 to 64"),
    "prompt_lookup_max": DraftKey("TOKENS", "5", "for ngram: the longest match, from 1 to 64"),
    "aux_hidden_state_layers": DraftKey(
        "LAYERS", "what the draft's config says", "for eagle3: the target's layers that the draft reads, [2, 15, 27]"
    ),
}
