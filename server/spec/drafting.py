"""How the draft drafts: how many tokens, how far, and whether they are accepted by lot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from server.checkpoint.checkpoint import Checkpoint
from server.engine.check import CheckRow
from server.engine.components import Ask
from server.engine.models.config import ModelConfig
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
    row = ask.row(
        str(limit), f"the lesser of the target's {target_limit} and the draft's {layers.max_position_embeddings}"
    )
    return limit, row if asked in (None, limit) else replace(row, why=f"asked for {asked}; the target ends at {limit}")


def num_tokens(settings: SpeculativeSettings, checkpoint: Checkpoint, method: Method) -> tuple[int, str]:
    """k, and why: named, what the draft's config says, or the default."""
    named = settings.num_speculative_tokens
    return _own_num_tokens(checkpoint.config, method) if named is None else (named, "asked for")


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


def check_rules(settings: SpeculativeSettings, k: int) -> None:
    """A schedule must not ask for longer drafts than there are.

    Raises:
        UserError: a rule's k is above `k`.
    """
    for rule in settings.num_speculative_tokens_per_batch_size or ():
        if rule.k > k:
            raise UserError(
                f"draft: {KEY}num_speculative_tokens_per_batch_size [{rule.lo}, {rule.hi}, {rule.k}]: drafts have at "
                f"most {k} tokens. Use at most {k}, or set {KEY}num_speculative_tokens to {rule.k}."
            )


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
                f"draft: {KEY}synthetic_acceptance_rates {list(settings.synthetic_acceptance_rates)} holds "
                f"{len(settings.synthetic_acceptance_rates)} rates; there must be one for each of the {k} positions."
            )
        return SyntheticAcceptance(settings.synthetic_acceptance_rates)
    assert settings.synthetic_acceptance_length is not None
    try:
        return SyntheticAcceptance.of_length(settings.synthetic_acceptance_length, k)
    except ValueError as error:
        raise UserError(f"draft: {KEY}synthetic_acceptance_length: {error}") from None
