"""How the draft drafts: how many tokens, how far, and whether they are accepted by lot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from server.checkpoint.checkpoint import Checkpoint
from server.engine.check import CheckRow
from server.engine.components import Ask
from server.engine.models.config import ModelConfig
from server.engine.models.recurrent import RecurrentConfig
from server.errors import UserError
from server.spec.settings import KEY, MAX_DRAFT_TOKENS, NEURAL_TOKENS, Method, SpeculativeSettings
from server.spec.verify import SyntheticAcceptance


def draft_max_model_len(target_limit: int, settings: SpeculativeSettings, layers: ModelConfig) -> tuple[int, CheckRow]:
    """Positions beyond which a sequence goes on without drafts.

    Raises:
        UserError: more than the draft has were asked for.
    """
    asked = settings.max_model_len
    if asked is not None and asked > layers.max_position_embeddings:
        raise UserError(
            f"draft: {KEY}max_model_len {asked}: the draft's positions end at {layers.max_position_embeddings}. "
            f"Use at most {layers.max_position_embeddings}."
        )
    limit = min(target_limit, asked or layers.max_position_embeddings)
    ask = Ask("draft", "max_model_len", KEY + "max_model_len", None if asked is None else str(asked))
    return limit, ask.row(
        str(limit),
        f"the lesser of the target's {target_limit} and the draft's {layers.max_position_embeddings}",
    )


def num_tokens(settings: SpeculativeSettings, checkpoint: Checkpoint, method: Method) -> tuple[int, CheckRow]:
    """k: named, what the draft's config says, or the default."""
    named = settings.num_speculative_tokens
    if named is not None:
        return named, k_row(settings, named, "")
    own, why = _own_num_tokens(checkpoint.config, method)
    return own, k_row(settings, own, why)


def _own_num_tokens(config: Mapping[str, object], method: Method) -> tuple[int, str]:
    """What the draft's own config says, else the default."""
    if method == "mtp":
        layers = config.get("num_nextn_predict_layers")
        if isinstance(layers, int) and layers > 0:
            return layers, "the config's num_nextn_predict_layers"
    speculators = config.get("speculators_config")
    if isinstance(speculators, Mapping):
        for proposal in speculators.get("proposal_methods") or []:
            tokens = proposal.get("speculative_tokens") if isinstance(proposal, Mapping) else None
            if isinstance(tokens, int) and 1 <= tokens <= MAX_DRAFT_TOKENS:
                return tokens, "the config's speculative_tokens"
    return NEURAL_TOKENS, "the default; the draft's config names none"


def k_row(settings: SpeculativeSettings, k: int, why: str) -> CheckRow:
    """The table's line for k."""
    named = settings.num_speculative_tokens
    ask = Ask("draft", "num_speculative_tokens", KEY + "num_speculative_tokens", None if named is None else str(named))
    return ask.row(f"{k}, adaptive" if is_adaptive(settings) else str(k), why)


def method_row(settings: SpeculativeSettings, method: Method, config: ModelConfig | RecurrentConfig | None) -> CheckRow:
    """Which method, and what was inferred of a head."""
    notes = "; ".join(config.notes) if config is not None and not isinstance(config, ModelConfig) else ""
    ask = Ask("draft", "method", KEY + "method", settings.method)
    row = ask.row(method, "told from the draft's tensors")
    return replace(row, why="; ".join(part for part in (row.why, notes) if part))


def is_adaptive(settings: SpeculativeSettings) -> bool:
    """Whether k follows how drafts fare; by default when nobody named k."""
    return settings.num_speculative_tokens is None if settings.adaptive_k is None else settings.adaptive_k


def synthetic_acceptance(settings: SpeculativeSettings, k: int) -> SyntheticAcceptance | None:
    """Acceptance by lot, when asked for.

    Raises:
        UserError: rates or a length that do not fit k.
    """
    if settings.rejection_sample_method != "synthetic":
        return None
    if settings.synthetic_acceptance_rates is not None:
        if len(settings.synthetic_acceptance_rates) != k:
            raise UserError(
                f"draft: {KEY}synthetic_acceptance_rates holds {len(settings.synthetic_acceptance_rates)} rates; "
                f"there must be one for each of the {k} positions."
            )
        return SyntheticAcceptance(settings.synthetic_acceptance_rates)
    assert settings.synthetic_acceptance_length is not None
    try:
        return SyntheticAcceptance.of_length(settings.synthetic_acceptance_length, k)
    except ValueError as error:
        raise UserError(f"draft: {KEY}synthetic_acceptance_length: {error}") from None
