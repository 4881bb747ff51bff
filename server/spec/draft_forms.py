"""In which forms a CPU keeps a draft's weights: the target's, but what is stored in 16 bits may be rounded to 8."""

from __future__ import annotations

from dataclasses import dataclass, replace

from server.engine.cpu.forms import ROUNDED, WeightForms
from server.engine.cpu.weights import BLOCK
from server.engine.models.config import ModelConfig
from server.engine.models.eagle3_config import Eagle3Config
from server.engine.models.recurrent import RecurrentConfig
from server.engine.quantization.format import UNQUANTIZED
from server.spec.draft_formats import DraftFormats


@dataclass(frozen=True)
class DraftForms:
    """How the weights are kept, and what the table says of their quantisation."""

    forms: WeightForms
    labels: str
    """Joined with "+"."""
    why: str


def draft_forms(
    target: WeightForms, config: ModelConfig | RecurrentConfig, found: DraftFormats, quantization: str | None
) -> DraftForms:
    """Round what is stored plainly, where the target is packed and nobody named the draft's quantisation.

    Rounding costs acceptance at most, never an answer, and halves what a draft step reads.
    """
    labels = set(found.labels.split("+"))
    plain = UNQUANTIZED.label
    if not target.packed or plain not in labels or quantization not in (None, "auto") or not _fits(config):
        return DraftForms(target, found.labels, found.why)
    labels = (labels if UNQUANTIZED in found.experts else labels - {plain}) | {ROUNDED}
    why = f"{found.why}; its linear layers are rounded, which changes no answer (not with quantization {plain})"
    return DraftForms(replace(target, rounded=True), "+".join(sorted(labels)), why)


def _fits(config: ModelConfig | RecurrentConfig) -> bool:
    model = config if isinstance(config, ModelConfig) else config.model
    widths = [model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim]
    if model.moe is not None:
        widths.append(model.moe.shared_intermediate_size)
    if isinstance(config, Eagle3Config):
        widths.append(config.target_hidden_size)
    return not any(width % BLOCK for width in widths)
