"""The table's lines about how the draft drafts; what its model is built with stands in `ModelSetup.rows`."""

from __future__ import annotations

from dataclasses import replace

from server.checkpoint.packaged_heads import PACKAGED_HEADS
from server.engine.check import CheckRow
from server.engine.components import Ask
from server.engine.models.config import ModelConfig
from server.engine.models.eagle3_config import Eagle3Config
from server.engine.models.recurrent import RecurrentConfig
from server.spec.drafting import is_adaptive
from server.spec.settings import KEY, Method, SpeculativeSettings


def method_row(asked: Method | None, method: Method, config: ModelConfig | RecurrentConfig | None) -> CheckRow:
    """Which method, and what was inferred of a head."""
    notes = "; ".join(config.notes) if config is not None and not isinstance(config, ModelConfig) else ""
    row = _row("method", asked, method, "told from the draft's tensors")
    return replace(row, why="; ".join(part for part in (row.why, notes) if part))


def packaged_rows(settings: SpeculativeSettings) -> list[CheckRow]:
    """Where the draft comes from, when it is one of this package's own."""
    if settings.model not in PACKAGED_HEADS:
        return []
    off = f"{KEY}method none turns it off"
    return [_row("model", None, settings.model, f"packaged with the server; {off}")]


def drafting_rows(settings: SpeculativeSettings, k: int, why: str) -> list[CheckRow]:
    """How many tokens, and how they are accepted."""
    adaptive = is_adaptive(settings)
    unnamed = "num_speculative_tokens is " + ("unset" if settings.num_speculative_tokens is None else "named")
    rows = [
        _row("num_speculative_tokens", settings.num_speculative_tokens, str(k), why),
        _row("adaptive_k", _truth(settings.adaptive_k), _truth(adaptive) or "", unnamed),
    ]
    if settings.num_speculative_tokens_per_batch_size is not None:
        rules = str([[rule.lo, rule.hi, rule.k] for rule in settings.num_speculative_tokens_per_batch_size])
        rows.append(_row("num_speculative_tokens_per_batch_size", rules, rules, ""))
    how = settings.rejection_sample_method
    return [*rows, _row("rejection_sample_method", how, how or "standard", "the default")]


def model_rows(settings: SpeculativeSettings, config: ModelConfig | RecurrentConfig) -> list[CheckRow]:
    """What only drafts with a model have."""
    how = settings.draft_sample_method
    rows = [_row("draft_sample_method", how, how or "greedy", "the default")]
    if settings.ignore_patterns:
        patterns = ", ".join(settings.ignore_patterns)
        rows.append(_row("ignore_patterns", patterns, patterns, ""))
    if isinstance(config, ModelConfig):
        rows += [
            _row(end, None, "the target's", f"the draft's files hold no {end}")
            for end, own in (("embedding", config.own_embedding), ("head", config.own_head))
            if not own
        ]
    if isinstance(config, Eagle3Config) and config.aux is not None:
        layers = settings.aux_hidden_state_layers
        said = None if layers is None else str(list(layers))
        rows.append(_row("aux_hidden_state_layers", said, str(list(config.capture)), config.aux.why))
    return rows


def lookup_rows(settings: SpeculativeSettings) -> list[CheckRow]:
    """What only ngram has."""
    return [
        _row("prompt_lookup_min", settings.prompt_lookup_min, str(settings.lookup_min), "the default"),
        _row("prompt_lookup_max", settings.prompt_lookup_max, str(settings.lookup_max), "the default"),
    ]


def _row(key: str, requested: str | int | None, resolved: str, why: str) -> CheckRow:
    return Ask("draft", key, KEY + key, None if requested is None else str(requested)).row(resolved, why)


def _truth(value: bool | None) -> str | None:
    return None if value is None else str(value).lower()
